-- Payloads as jsonb. A json stream accepts any JSON, and jsonb cannot store all of it: no U+0000, no unpaired
-- surrogate, and only numbers within the range of numeric. All code that reads a payload as jsonb calls as_jsonb().

-- A payload of a json stream as jsonb. It never fails: where jsonb cannot store the payload, the result is the nearest
-- value. \u0000 and unpaired surrogates are omitted; a number keeps 40 digits after the decimal point, and the first 4
-- digits of its exponent. (So a number beyond numeric stays beyond double.)
-- Returns null for JSON that is nested too deeply or is too large.
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
        -- surrogate pairs and other escapes stay
        regexp_replace(p_data, E'(\\\\u[dD][89abAB][[:xdigit:]]{2}\\\\u[dD][c-fC-F][[:xdigit:]]{2}|\\\\[^u])'
                       || E'|\\\\u(?:0000|[dD][89a-fA-F][[:xdigit:]]{2})', E'\\1', 'g'),
        -- a string, which stays, or the end of a number (a repetition of many digits would make each match slow)
        E'("(?:[^"\\\\]|\\\\.)*"|[.][0-9]{40}|[eE][-+]?0*[0-9]{4})[0-9]*', E'\\1', 'g')::jsonb;
exception
    when program_limit_exceeded or data_exception then
        return null;
    when internal_error then  -- so many elements that their jsonb exceeds 1 GB
        if octet_length(p_data) < 33554432 then
            raise;
        end if;
        return null;
end $$;
