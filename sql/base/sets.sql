-- Arithmetic on sets of sequence numbers.

-- Whether a publication is for a consumer.
create or replace function _pgqueue.is_for(p_consumers int[], p_consumer_id int) returns boolean
language sql immutable parallel safe as $$ select p_consumers is null or p_consumer_id = any (p_consumers) $$;

-- The number of elements of a set.
create or replace function _pgqueue.cardinality(p_set int8multirange) returns bigint
language plpgsql immutable strict parallel safe as $$
begin
    if p_set = int8multirange(range_merge(p_set)) then
        return coalesce(upper(p_set) - lower(p_set), 0);
    end if;
    return (select sum(upper(r) - lower(r))::bigint from unnest(p_set) r);
end $$;

-- The number of deliveries after one more, which does not exceed the largest int.
create or replace function _pgqueue.one_more(p_deliver_count int) returns int
language sql immutable parallel safe as $$ select least(p_deliver_count, 2147483646) + 1 $$;

-- The set of some numbers. Null for null. Errors: PQ003 when one of the numbers is null, or the array has several
-- dimensions.
create or replace function _pgqueue.set_of(p_seqs bigint[]) returns int8multirange
language plpgsql immutable strict parallel safe as $$
begin
    if array_ndims(p_seqs) > 1 then
        raise exception 'p_seqs must have one dimension, not %', array_ndims(p_seqs)
            using errcode = 'PQ003', column = 'p_seqs';
    elsif array_position(p_seqs, null) is not null then
        raise exception 'p_seqs must not contain null'
            using errcode = 'PQ003', column = 'p_seqs',
                  hint = 'Pass the seqs of messages, or null for the whole claim.';
    end if;
    -- no message has the largest bigint, and no range can end after it
    if cardinality(p_seqs) = 1 and p_seqs[array_lower(p_seqs, 1)] < 9223372036854775807 then
        return int8multirange(int8range(p_seqs[array_lower(p_seqs, 1)], p_seqs[array_lower(p_seqs, 1)], '[]'));
    end if;
    return (select coalesce(range_agg(int8range(s, s, '[]')), '{}') from unnest(p_seqs) s
            where s < 9223372036854775807);
end $$;

-- The next three compare each of many sets with a large one. The operators && and * read the large set from its start
-- each time; comparing it with a range is a binary search, and most sets of messages are a range.

-- Whether two sets have common elements. Null: p_set is null.
create or replace function _pgqueue.meets(p_each int8multirange, p_set int8multirange) returns boolean
language sql immutable parallel safe as $$
    select range_merge(p_each) && p_set and (p_each = int8multirange(range_merge(p_each)) or p_each && p_set)
$$;

-- The elements of one set that are in another one. Null: p_set is null.
create or replace function _pgqueue.common(p_each int8multirange, p_set int8multirange) returns int8multirange
language sql immutable parallel safe as $$
    select case when not range_merge(p_each) && p_set then '{}'
                when range_merge(p_each) <@ p_set then p_each else p_each * p_set end
$$;

-- The elements of one set that are not in another one. p_set may be null: then all.
create or replace function _pgqueue.less(p_each int8multirange, p_set int8multirange) returns int8multirange
language sql immutable parallel safe as $$
    select case when (range_merge(p_each) && p_set) is not true then p_each
                when range_merge(p_each) <@ p_set then '{}' else p_each - p_set end
$$;

-- The elements of a set that are below p_below.
create or replace function _pgqueue.below(p_set int8multirange, p_below bigint) returns int8multirange
language sql immutable parallel safe as $$ select p_set * int8multirange(int8range(null, p_below)) $$;

-- The bound below which a set has exactly p_n elements. p_n is from 1 to the number of elements.
create or replace function _pgqueue.bound_of(p_set int8multirange, p_n bigint) returns bigint
language plpgsql immutable parallel safe as $$
declare
    v_range int8range;
    v_left  bigint := p_n;
begin
    for v_range in select unnest(p_set) loop
        if upper(v_range) - lower(v_range) >= v_left then
            return lower(v_range) + v_left;
        end if;
        v_left := v_left - (upper(v_range) - lower(v_range));
    end loop;
    raise exception 'the set has fewer than % elements', p_n;
end $$;

-- Whether a set has at most limit_ranges() ranges: removing elements from a set costs in proportion to its ranges.
create or replace function _pgqueue.has_few_ranges(p_set int8multirange) returns boolean
language plpgsql immutable parallel safe as $$
begin
    if p_set = int8multirange(range_merge(p_set)) then
        return true;
    end if;
    return (select count(*) from unnest(p_set)) <= _pgqueue.limit_ranges();
end $$;

-- Splits a set into sets of at most limit_ranges() ranges, in order.
create or replace function _pgqueue.split_set(p_set int8multirange)
returns table (seqs int8multirange, message_count bigint, first_seq bigint)
language sql immutable parallel safe as $$
    select p_set, upper(p_set) - lower(p_set), lower(p_set)  -- a range, as nearly all are
    where p_set = int8multirange(range_merge(p_set)) and p_set <> '{}'
    union all
    (select range_agg(x.r), sum(upper(x.r) - lower(x.r))::bigint, min(lower(x.r))
     from (select r, (row_number() over (order by lower(r)) - 1) / _pgqueue.limit_ranges() as chunk
           from unnest(p_set) r where p_set <> int8multirange(range_merge(p_set))) x
     group by x.chunk
     order by x.chunk)
$$;

-- The last ranges of a set, at most p_max.
create or replace function _pgqueue.last_ranges(p_set int8multirange, p_max int) returns int8multirange
language sql immutable parallel safe as $$
    select coalesce(range_agg(l.r), '{}') from (select r from unnest(p_set) r order by r desc limit p_max) l
$$;

-- Splits a set into parts that are in another set, or outside of it, in order.
create or replace function _pgqueue.split_by(p_set int8multirange, p_other int8multirange)
returns table (inside boolean, seqs int8multirange)
language sql immutable parallel safe as $$
    select s.inside, range_agg(s.r)
    from (select e.inside, e.r, row_number() over (order by e.r)
                                - row_number() over (partition by e.inside order by e.r) as run
          from (select true as inside, r from unnest(_pgqueue.common(p_set, p_other)) r
                union all
                select false, r from unnest(_pgqueue.less(p_set, p_other)) r) e) s
    group by s.inside, s.run
    order by min(lower(s.r))
$$;
