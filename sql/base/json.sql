-- Payloads as jsonb. A json stream takes all that is JSON, and jsonb holds less: no U+0000, no half of a surrogate
-- pair, and numbers within the bounds of numeric. All code that reads a payload as jsonb calls as_jsonb().

-- A payload of a json stream as jsonb, which never fails. Where jsonb cannot hold it, it becomes the nearest that jsonb
-- holds: \u0000, and half of a surrogate pair, is left out; a number keeps 40 digits behind the point, and the first 4
-- of its exponent. (So what is beyond numeric stays beyond double.)
-- Returns null for JSON that is nested too deeply or is too large for that.
create or replace function _pgqueue.as_jsonb(p_data text) returns jsonb
language plpgsql immutable as $$
begin
    begin
        return p_data::jsonb;
    exception when data_exception then
        if octet_length(p_data) > _pgqueue.max_repaired_bytes() then
            return null;
        end if;
    end;
    return regexp_replace(
        -- pairs, and other escapes, stay as they are
        regexp_replace(p_data, E'(\\\\u[dD][89abAB][[:xdigit:]]{2}\\\\u[dD][c-fC-F][[:xdigit:]]{2}|\\\\[^u])'
                       || E'|\\\\u(?:0000|[dD][89a-fA-F][[:xdigit:]]{2})', E'\\1', 'g'),
        -- a text, which stays as it is, or the end of a number (a repetition of many digits makes each match slow)
        E'("(?:[^"\\\\]|\\\\.)*"|[.][0-9]{40}|[eE][-+]?0*[0-9]{4})[0-9]*', E'\\1', 'g')::jsonb;
exception
    when program_limit_exceeded or data_exception then
        return null;
    when internal_error then  -- so many elements that jsonb needs more than 1 GB for them
        if octet_length(p_data) < 33554432 then
            raise;
        end if;
        return null;
end $$;
