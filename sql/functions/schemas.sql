-- Schemas of streams: setting one, and looking at it. base/schemas.sql reads them.

-- Raises PQ003 for a schema that the stream cannot have: only JSON has columns, and a schema takes what the one before
-- it took.
-- on before_set_stream: perform _pgqueue.check_schema(p_stream.kind, p_stream.schema, p_settings);
create or replace function _pgqueue.check_schema(p_kind text, p_old text, p_settings jsonb) returns void
language plpgsql
as $$
declare
    v_change text := _pgqueue.schema_change(_pgqueue.read_schema(p_old), _pgqueue.read_schema(p_settings ->> 'schema'))
                     where p_old is not null and p_settings ->> 'schema' is not null;
begin
    if p_settings ->> 'schema' is not null and p_kind <> 'json' then
        raise exception 'p_settings: schema is for streams of kind json, not %', p_kind
            using errcode = 'PQ003', column = 'p_settings';
    elsif v_change is not null then
        raise exception 'p_settings: schema takes no longer what it took: %', v_change
            using errcode = 'PQ003', column = 'p_settings',
                  hint = 'Add columns that may be null. To begin another schema, set schema to null first.';
    end if;
end $$;

-- Returns the columns of a stream's schema, as Spark writes a schema in JSON: for StructType.fromJson, and from_json.
-- Null: the stream has no schema. Errors: PQ001. Locks: none.
create or replace function pgqueue.schema_of(p_stream text) returns jsonb
language sql stable
as $$ select _pgqueue.read_schema((_pgqueue.stream(p_stream)).schema) $$;
