"""Every argument of every public function, given badly: refused by name, and nothing changes.

Each case is a call as one types it, the SQLSTATE, and what the message has to name: what was given
and what is allowed. {names} stand for what the fixture made.
"""
# ruff: noqa: E501  a case is a line

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from spark_pgqueue.postgres import schema
from tests.docs.headers import headers_in
from tests.sql import internals
from tests.sql.queue import call, claim_of, one, value

Conn = psycopg.Connection
Case = tuple[str, str, list[str]]

READER = "00000000-0000-0000-0000-000000000001"
NEW_READER = "00000000-0000-0000-0000-000000000002"
LONG = "repeat('n', 201)"
LONG_KEY = "(select string_agg(md5(i::text), '') from generate_series(1, 400) i)"

NAME = ["1 to 200 characters"]
KIND = ["text, json or binary"]
ORDERING = ["none, key or stream"]
START = ["earliest, latest, a timestamp, seq and a number, or an offset"]
TOPIC = ["words separated by dots, 1 to 1,024 bytes in total"]
TIMEOUT = ["longer than 0 and up to 10 years"]
AGE = ["longer than 0"]
DELAY = ["from 0 to 10 years"]
PRIORITY = ["p_priority", "-32768 to 32767"]
UNKNOWN_STREAM = ["unknown stream", "create_stream", "Available: 'b', 'd', 'j', 't'"]
UNKNOWN_CONSUMER = ["unknown consumer", "of stream 't'", "create_consumer", "Available: 'c', 'o'"]
RECEIVERS = ["p_consumers", "null to publish to all"]
DROPPED = ["stream", "dropped"]


def action(action: str, **more: str) -> str:
    """A list of one action, as SQL."""
    known = {"action": action, "stream": "t", "consumer": "c", "seqs": "{[1,2)}", **more}
    pairs = ", ".join(f"'{name}', '{value}'" for name, value in known.items())
    return f"jsonb_build_array(jsonb_build_object({pairs}))"


CASES: list[Case] = [
    # what is not there
    *((call, "PQ001", ["'no'", *UNKNOWN_STREAM]) for call in (
        "alter_stream('no', '{}')", "create_schedule('no', 'h', '@daily', p_data => 'x')", "drop_schedule('no', 'h')",
        "pause_schedule('no', 'h')", "resume_schedule('no', 'h')", "next_due('no', 'c')",
        "receive_where('no', 'c', '$')", "cancel('no', 'c', '{1}')", "failures('no', 'c', 1)",
        "postpone('no', 'c', '{1}', now())", "outcome('no', 'c', 1)", "listen_done('no', 'c')",
        "explain_message('no', 'c', 1)", "key_stats('no', 'c')", "peek('no', 'c')", "peek_at('no', 1)",
        "consumer_position('no', 'c')", "scan('no', 'dead') m (lo bigint)", "scan_claimed('no') m (lo bigint)",
        "scan_bounds('no', 'dead')", "read_dead('no', 'c')", "redrive('no', 'c')", "purge_dead('no', 'c')",
        "retry('no', 'c')", "alter_consumer('no', 'c', '{}')", "drop_stream('no')", "create_consumer('no', 'n')",
        "seek('no', 'c', 'latest')", "replay('no', 'c', 'earliest', 'latest')", "bind('no', 'a', 't')",
        "bind('t', 'a', 'no')", "unbind('no', 'a', 't')", "unbind('t', 'a', 'no')", "pause('no', 'c')",
        "resume('no', 'c')", "drop_consumer('no', 'c')", "start_offset('no')", "read_to('no', null)",
        "end_offset('no', null, 'latest')", "offset_lag('no', null)", "size_between('no', null, null)",
        "read_plan('no', null, null)", "read('no')", "create_group('no', 'x')", "lease_partitions('no', 'g', 'w')",
        "leave_group('no', 'g', 'w')", "note_offset('no', 'g', '{}')", "plan_partitions('no', 'g', '{}')",
        "read_partitions('no', 'g', '{}')", "send('no', 'x')", "start_waiting('no')", "still_publishing('no', '{}')",
        "stop_waiting('no')", "send_batch('no', '{x}')", "set_retention('no', '1 day')", "set_archive('no', '/a')",
        "drop_archive('no')", "open_stream('no')", "schema_of('no')", "open_consumer('no', 'c')", "open_sink('no')",
        "publish_written('no', '{[1,3)}')",
    )),
    *((call, "PQ001", ["null", *UNKNOWN_STREAM]) for call in (
        "drop_stream(null)", "create_consumer(null, 'n')", "send(null, 'x')", "start_waiting(null)",
        "send_batch(null, '{x}')", "set_retention(null)", "open_stream(null)", "schema_of(null)", "open_sink(null)",
    )),
    *((call, "PQ002", ["'no'", *UNKNOWN_CONSUMER]) for call in (
        "next_due('t', 'no')", "receive_where('t', 'no', '$')", "cancel('t', 'no', '{1}')", "failures('t', 'no', 1)",
        "postpone('t', 'no', '{1}', now())", "outcome('t', 'no', 1)", "listen_done('t', 'no')",
        "explain_message('t', 'no', 1)", "key_stats('t', 'no')", "peek('t', 'no')", "consumer_position('t', 'no')",
        "scan('t', 'dead', 'no') m (lo bigint)", "scan_claimed('t', 'no') m (lo bigint)",
        "scan_bounds('t', 'dead', 'no')", "read_dead('t', 'no')", "redrive('t', 'no')", "purge_dead('t', 'no')",
        "retry('t', 'no')", "alter_consumer('t', 'no', '{}')", "seek('t', 'no', 'latest')",
        "replay('t', 'no', 'earliest', 'latest')", "pause('t', 'no')", "resume('t', 'no')",
        "drop_consumer('t', 'no')", "open_consumer('t', 'no')",
    )),
    *((call, "PQ002", ["null", *UNKNOWN_CONSUMER]) for call in (
        "scan('t', 'pending') m (lo bigint)", "drop_consumer('t', null)", "open_consumer('t', null)",
    )),
    *((call, "PQ003", ["p_seqs", "null"]) for call in (
        "defer(1, '{null}')", "cancel('t', 'c', '{1, null}')", "postpone('t', 'c', '{1, null}', now())",
        "redrive('t', 'c', '{1,null}')", "ack({claim}, array[null]::bigint[])", "ack({claim}, array[1, null])",
        "nack({claim}, array[null]::bigint[])", "dead_letter({claim}, array[null]::bigint[])",
    )),
    *((call, "PQ006", ["'c'", "not a group"]) for call in (
        "create_group('t', 'c')", "lease_partitions('t', 'c', 'w')", "leave_group('t', 'c', 'w')",
        "note_offset('t', 'c', '{}')", "plan_partitions('t', 'c', '{}')", "read_partitions('t', 'c', '{}')",
    )),
    *((call, "PQ002", ["'no'", *RECEIVERS]) for call in (
        "send('t', 'x', p_consumers => '{no}')", "send('t', 'x', p_consumers => '{c, no}')",
        "send_batch('t', '{x}', p_consumers => '{no}')", "open_sink('t', '{no}')",
        "publish_written('t', '{[1,3)}', 0, null, '{no}')", "stage('s', 1, {t}, '{[1,3)}', p_consumers => '{no}')",
    )),
    *((call, "PQ003", ["empty", *RECEIVERS]) for call in (
        "send('t', 'x', p_consumers => '{}')", "send_batch('t', '{x}', p_consumers => '{}')", "open_sink('t', '{}')",
        "publish_written('t', '{[1,3)}', 0, null, '{}')", "stage('s', 1, {t}, '{[1,3)}', p_consumers => '{}')",
    )),
    *((call, "PQ003", ["p_seqs"]) for call in (
        "ack({claim}, array[[1], [2]])", "publish_written('t', null)", "publish_written('t', '{[1,)}')",
        "stage('s', 1, {t}, null)", "stage('s', 1, {t}, '{}')", "stage('s', 1, {t}, '{[1,)}')",
        "stage('s', 1, {t}, '{(,3)}')",
    )),
    *((call, "PQ003", ["p_write_no", "begin_write()"]) for call in (
        "stage('s', 1, {t}, '{[1,3)}', p_write_no => 1)", "stage('s', 1, {t}, '{[1,3)}', p_write_no => 1000000000000)",
    )),
    *((call, "PQ002", ["consumer", "dropped"]) for call in (
        "reader_claim({new}, null, 0, 0)", "reader_claim({new}, 999, 0, 0)", "reader_ack({reader}, null, 0)",
        "reader_release({reader}, null, 0)", "reader_fork({reader}, null, 0, 0)",
        "reader_resume({reader}, null, 0, 0)",
    )),
    *((call, "PQ001", DROPPED) for call in (
        "reserve(null, 1)", "reserve(999, 1)", "stage('s', 1, null, '{[1,3)}')", "stage('s', 1, 999, '{[1,3)}')",
        "publish_staged('s', 0, 999, array[{staged}], 1)",
    )),
    *((call, "PQ003", ["p_sink", "null"]) for call in (
        "stage(null, 1, {t}, '{[1,3)}')", "settle_messages(null, 0, '[]')", "unstage(null, 0, '{}')",
        "open_table_write(1, null, 0, '{\"columns\": []}')", "begin_table_batch(1, null, 0, 'public.x', 1)",
        "apply_table_batch(1, null, 0, 'pg_catalog.pg_class', '{}', 0)",
        "publish_staged(null, 0, {t}, array[{staged}], 1)",
    )),
    # streams
    ("create_stream(null)", "PQ003", ["null", "stream", *NAME]),
    ("create_stream('')", "PQ003", ["''", *NAME]),
    ("create_stream(' t')", "PQ003", ["' t'", *NAME]),
    (f"create_stream({LONG})", "PQ003", ["nnn", *NAME]),
    ("create_stream('n', 'xml')", "PQ003", ["p_kind", "'xml'", *KIND]),
    ("create_stream('n', null)", "PQ003", ["p_kind", "null", *KIND]),
    ("create_stream('n', p_settings => null)", "PQ003", ['p_settings must be a JSON object with a value for each setting, such as {"dedup_window": null}, not null']),
    ("create_stream('n', p_settings => '{\"max_bytes\": 0}')", "PQ003", ["max_bytes", "1 to 268435456, not 0"]),
    ("create_stream('n', p_settings => '{\"max_bytes\": 268435457}')", "PQ003", ["not 268435457"]),
    ("create_stream('n', p_settings => '{\"max_header_bytes\": 1}')", "PQ003", ["2 to 1048576, not 1"]),
    ("create_stream('n', p_settings => '{\"max_header_bytes\": 1048577}')", "PQ003", ["not 1048577"]),
    ("create_stream('n', p_settings => '{\"dedup_window\": \"0\"}')", "PQ003", ["dedup_window", "longer than 0"]),
    ("alter_stream('t', '{\"dedup_window\": \"-1 s\"}')", "PQ003", ["dedup_window", "longer than 0", "-1 s"]),
    ("alter_stream('t', '{\"dedup_window\": \"11 years\"}')", "PQ003", ["up to 10 years", "11 years"]),
    ("create_stream('t')", "PQ006", ["'t'", "already exists", "text", "Set p_if_not_exists", "use alter_stream"]),
    ("create_stream('t', 'json', p_if_not_exists => true)", "PQ006", ["'t'", "kind text", "kind of a stream cannot change: use another name"]),
    ("alter_stream('t', null)", "PQ003", ["p_settings", "JSON object", "null"]),
    ("alter_stream('t', '{\"max_byte\": 1}')", "PQ003", ["'max_byte'", "Did you mean max_bytes?", "dedup_window"]),
    ("alter_stream('t', '{\"qq\": 1}')", "PQ003", ["'qq'", "\nAvailable: dedup_window"]),
    ("alter_stream('t', '{\"max_bytes\": 0}')", "PQ003", ["max_bytes", "null (default: 16777216)", "1 to 268435456, not 0"]),
    ("alter_stream('t', '{\"schema\": \"id int\"}')", "PQ003", ["schema requires a stream of kind json, not text"]),
    ("alter_stream('j', '{\"schema\": \"id map\"}')", "PQ003", ["as word 2, 'map', but a type"]),
    ("alter_stream('t', '{\"notify\": \"perhaps\"}')", "PQ003", ["notify", "true or false", "perhaps"]),
    # schedules
    ("create_schedule('t', '', '@daily', p_data => 'x')", "PQ003", ["''", *NAME]),
    ("create_schedule('t', null, '@daily', p_data => 'x')", "PQ003", ["null", *NAME]),
    ("create_schedule('t', 'h', p_data => 'x')", "PQ003", ["p_cron and p_every", "none"]),
    ("create_schedule('t', 'h', '@daily', '1 hour', p_data => 'x')", "PQ003", ["p_cron and p_every", "not both"]),
    ("create_schedule('t', 'h', '61 * * * *', p_data => 'x')", "PQ003", ["minute of p_cron", "0 to 59", "'61'"]),
    ("create_schedule('t', 'h', '0 0 30 2 *', p_data => 'x')", "PQ003", ["p_cron never matches", "'0 0 30 2 *'"]),
    ("create_schedule('t', 'h', p_every => '0', p_data => 'x')", "PQ003", ["p_every", "1 second to 10 years", "'00:00:00'"]),
    ("create_schedule('t', 'h', '@daily', p_time_zone => 'Mars', p_data => 'x')", "PQ003", ["p_time_zone", "Europe/Berlin", "'Mars'"]),
    ("create_schedule('t', 'h', '@daily', p_data => null)", "PQ004", ["must have text as p_data"]),
    ("create_schedule('t', 'h', '@daily', p_data => 'x', p_data_bytes => 'x')", "PQ004", ["and no bytes"]),
    ("create_schedule('t', 'h', '@daily', p_data => 'x', p_key => repeat('k', 2000))", "PQ003", ["p_key", "1,024 bytes", "2000"]),
    ("create_schedule('t', 'h', '@daily', p_data => 'x', p_headers => '5')", "PQ003", ["p_headers", "JSON object", "number"]),
    ("create_schedule('t', 'h', '@daily', p_data => 'x', p_headers => jsonb_build_object('h', repeat('x', 65520)))", "PQ003", ["p_headers", "at most 65536 bytes"]),
    ("create_schedule('t', 'h', '@daily', p_data => 'x', p_priority => 99999)", "PQ003", [*PRIORITY, "99999"]),
    ("create_schedule('t', 'h', '@daily', p_data => 'x', p_consumers => '{no}')", "PQ002", ["'no' in p_consumers"]),
    ("create_schedule('t', 'h', '@daily', p_data => 'x', p_consumers => '{}')", "PQ003", ["p_consumers", "no consumer"]),
    ("create_schedule('t', 'h', '@daily', p_data => 'x', p_start => now())", "PQ003", ["p_start", "p_every"]),
    ("create_schedule('t', 'h', p_every => '1 hour', p_data => 'x', p_start => 'infinity')", "PQ003", ["p_start", "infinity"]),
    ("drop_schedule('t', 'no')", "PQ003", ["unknown schedule 'no'"]),
    ("drop_schedule('t', null)", "PQ003", ["unknown schedule null"]),
    ("pause_schedule('t', 'no')", "PQ003", ["unknown schedule 'no'"]),
    ("resume_schedule('t', 'no')", "PQ003", ["unknown schedule 'no'"]),
    ("schedule_times()", "PQ003", ["p_cron and p_every", "none"]),
    ("schedule_times('61 * * * *')", "PQ003", ["minute of p_cron", "'61'"]),
    ("schedule_times(p_every => '-1 hour')", "PQ003", ["p_every", "'-01:00:00'"]),
    ("schedule_times('@daily', p_time_zone => 'Mars')", "PQ003", ["p_time_zone", "'Mars'"]),
    ("schedule_times('@daily', p_time_zone => null)", "PQ003", ["p_time_zone", "not null"]),
    ("schedule_times('@daily', p_count => 0)", "PQ003", ["p_count", "1 to 1000, not 0"]),
    ("schedule_times('@daily', p_after => 'infinity')", "PQ003", ["p_after", "infinity"]),
    ("schedule_times('@daily', p_start => now())", "PQ003", ["p_start", "p_every"]),
    # putting off, expiry, history
    ("defer(1, p_delay => '-1 s')", "PQ003", ["p_delay", *DELAY, "'-00:00:01'"]),
    ("defer(1, p_delay => '11 years')", "PQ003", ["p_delay", *DELAY, "'11 years'"]),
    ("defer(1, p_delay => null)", "PQ003", ["p_delay", *DELAY, "null"]),
    ("send('t', 'x', p_expires_at => 'infinity')", "PQ003", ["p_expires_at", "infinity"]),
    ("send('t', 'x', p_deliver_at => '2100-01-01', p_expires_at => '2099-01-01')", "PQ003", ["p_expires_at", "after p_deliver_at", "2099-01-01"]),
    ("send('t', 'x', p_deliver_at => '2100-01-01', p_expires_at => '2100-01-01')", "PQ003", ["p_expires_at", "after p_deliver_at"]),
    ("send_batch('t', '{x}', p_deliver_at => '2100-01-01', p_expires_at => '2100-01-01')", "PQ003", ["p_expires_at", "after p_deliver_at"]),
    ("send_batch('t', '{x}', p_expires_at => 'infinity')", "PQ003", ["p_expires_at", "infinity"]),
    ("publish_written('t', '{[1,2)}', p_expires_at => 'infinity')", "PQ003", ["p_expires_at", "infinity"]),
    ("receive_where('d', 'g', '$')", "PQ006", ["'g' is a group", "lease_partitions"]),
    ("receive_where('t', 'c', null)", "PQ003", ["p_where", "a jsonpath", "null"]),
    ("receive_where('t', 'c', '$.a == $b')", "PQ003", ["p_where", "must not contain variables"]),
    ("receive_where('t', 'c', '$.**.**')", "PQ003", ["p_where", "once", "$.data.items[*]"]),
    ("receive_where('t', 'c', '$ ? (exists(@.** ? (exists(@.**{2 to last}))))')", "PQ003", ["p_where", "once"]),
    ("receive_where('t', 'c', ('$.a == \"' || repeat('x', 5000) || '\"')::jsonpath)", "PQ003", ["at most 4096 bytes"]),
    ("receive_where('t', 'c', '$', 0)", "PQ003", ["p_max", "not 0"]),
    ("receive_where('t', 'c', '$', p_visibility_timeout => '0')", "PQ003", ["p_visibility_timeout", *TIMEOUT]),
    ("receive_where('t', 'c', '$', p_look => 0)", "PQ003", ["p_look", "1 to 1000000, not 0"]),
    ("receive_where('t', 'c', '$', p_look => null)", "PQ003", ["p_look", "null"]),
    ("alter_consumer('t', 'c', '{\"max_in_flight\": 0}')", "PQ003", ["max_in_flight", "at least 1, not 0"]),
    ("alter_consumer('t', 'c', '{\"rate_limit\": 5}')", "PQ003", ["rate_limit messages", "set both"]),
    ("alter_consumer('t', 'c', '{\"rate_interval\": \"5\"}')", "PQ003", ["rate_interval", "longer than 0"]),
    ("cancel('d', 'g', '{1}')", "PQ006", ["'g' is a group"]),
    ("cancel('t', 'c', null)", "PQ003", ["p_seqs", "null", "seek takes all"]),
    ("cancel('t', 'c', '{{1},{2}}')", "PQ003", ["p_seqs", "one dimension"]),
    ("failures('t', 'c', 0)", "PQ003", ["p_seq", "1 to", "not 0"]),
    ("postpone('d', 'g', '{1}', now())", "PQ006", ["'g'", "group"]),
    ("postpone('t', 'c', null, now())", "PQ003", ["p_seqs", "null", "pause stops"]),
    ("postpone('t', 'c', '{1}', null)", "PQ003", ["p_until", "a finite time", "null"]),
    ("postpone('t', 'c', '{1}', 'infinity')", "PQ003", ["p_until", "a finite time", "infinity"]),
    ("outcome('t', 'c', 0)", "PQ003", ["p_seq", "1 to", "not 0"]),
    # seeing
    ("explain_message('t', 'c', 0)", "PQ003", ["p_seq", "1 to", "not 0"]),
    ("explain_message('t', 'c', -1)", "PQ003", ["p_seq", "1 to", "not -1"]),
    ("explain_message('t', 'c', null)", "PQ003", ["p_seq", "not null"]),
    ("key_stats('t', 'c', 0)", "PQ003", ["p_max", "1 to", "not 0"]),
    ("key_stats('t', 'c', null)", "PQ003", ["p_max", "not null"]),
    # looking
    ("peek('t', 'c', 0)", "PQ003", ["p_max", "not 0"]),
    ("peek('t', 'c', null)", "PQ003", ["p_max", "not null"]),
    ("peek_at('t', 0)", "PQ003", ["p_seq", "not 0"]),
    ("peek_at('t', null)", "PQ003", ["p_seq", "not null"]),
    ("peek_at('t', 1, 0)", "PQ003", ["p_max", "not 0"]),
    ("scan('t', 'stats') m (lo bigint)", "PQ003", ["p_table", "pending, dead, archived or publications", "'stats'"]),
    ("scan('t', 'claimed') m (lo bigint)", "PQ003", ["p_table", "'claimed'"]),
    ("scan('t', null) m (lo bigint)", "PQ003", ["p_table", "not null"]),
    ("scan('t', 'dead', p_columns => '{raeson}') m (lo bigint)", "PQ003", ["p_columns", "table dead", "raeson"]),
    ("scan('t', 'pending', 'c', '{claim_id}') m (lo bigint)", "PQ003", ["p_columns", "table pending", "claim_id"]),
    ("scan_claimed('t', p_columns => '{state, \"x y\"}') m (lo bigint)", "PQ003", ["p_columns", "table claimed", "x y"]),
    ("scan_bounds('t', 'messages')", "PQ003", ["p_table", "dead, archived or publications", "'messages'"]),
    ("scan_bounds('t', null)", "PQ003", ["p_table", "not null"]),
    ("scan_bounds('t', 'dead', p_count => 0)", "PQ003", ["p_count", "not 0"]),
    ("server_of('k', 0)", "PQ003", ["p_servers must be 1 to 2147483647, not 0"]),
    ("server_of('k', null)", "PQ003", ["p_servers", "not null"]),
    ("scan_where(null, '{seq}')", "PQ003", ["p_where", "an expression over columns", "null"]),
    ("scan_where(' ', '{seq}')", "PQ003", ["p_where", "1 to 4096 bytes", "' '"]),
    ("scan_where('seq > 0 or ' || repeat('seq', 2000), '{seq}')", "PQ003", ["p_where", "1 to 4096 bytes"]),
    ("scan_where('seq > 0', null)", "PQ003", ["p_where", "no column seq"]),
    ("read_dead('t', 'c', p_max => 0)", "PQ003", ["p_max", "not 0"]),
    ("read_dead('t', 'c', p_max => null)", "PQ003", ["p_max", "not null"]),
    ("read_dead('t', 'c', p_after => -1)", "PQ003", ["p_after", "not -1"]),
    ("redrive('t', 'c', p_max => 0)", "PQ003", ["p_max", "at least 1, not 0"]),
    ("purge_dead('t', 'c', p_max => -1)", "PQ003", ["p_max", "at least 1, not -1"]),
    ("alter_consumer('t', 'c', '[]')", "PQ003", ["p_settings", "JSON object", "[]"]),
    # consumers
    ("create_consumer('t', null)", "PQ003", ["null", "consumer", *NAME]),
    ("create_consumer('t', ' ')", "PQ003", ["' '", *NAME]),
    (f"create_consumer('t', {LONG})", "PQ003", ["nnn", *NAME]),
    ("create_consumer('t', 'n', 'soon')", "PQ003", ["p_start", "'soon'", *START]),
    ("create_consumer('t', 'n', '2026-13-45')", "PQ003", ["'2026-13-45'", *START]),
    ("create_consumer('t', 'n', '2026-01-01 0:00 No/Where')", "PQ003", ["No/Where", *START]),
    ("create_consumer('t', 'n', '')", "PQ003", ["''", *START]),
    ("create_consumer('t', 'n', null)", "PQ003", ["null", *START]),
    ("create_consumer('t', 'n', 'seq')", "PQ003", ["'seq'", *START]),
    ("create_consumer('t', 'n', 'seq -1')", "PQ003", ["'seq -1'", *START]),
    ("create_consumer('t', 'n', 'seq 0')", "PQ003", ["p_start", "'seq 0'", "seq 1 to seq "]),
    ("create_consumer('t', 'n', 'seq 999')", "PQ003", ["p_start", "'seq 999'", "seq 1 to seq "]),
    ("create_consumer('t', 'n', 'seq 99999999999999999999')", "PQ003", ["'seq 9999", *START]),
    ("seek('t', 'c', 'soon')", "PQ003", ["p_to", "'soon'", *START]),
    ("seek('t', 'c', null)", "PQ003", ["p_to", "null", *START]),
    ("seek('t', 'c', 'seq 999')", "PQ003", ["p_to", "'seq 999'"]),
    ("replay('t', 'c', 'soon', 'latest')", "PQ003", ["p_from", "'soon'", *START]),
    ("replay('t', 'c', 'earliest', 'soon')", "PQ003", ["p_to", "'soon'", *START]),
    ("replay('t', 'c', 'earliest', null)", "PQ003", ["p_to", "null", *START]),
    ("create_consumer('t', 'n', p_topic => '')", "PQ003", ["p_topic", "''", *TOPIC]),
    ("create_consumer('t', 'n', p_topic => 'a..b')", "PQ003", ["p_topic", "a word", "'a..b'"]),
    ("create_consumer('t', 'n', p_topic => 'a.b*')", "PQ003", ["a word", "'b*'", "'a.b*'"]),
    ("create_consumer('t', 'n', p_topic => repeat('x', 1025))", "PQ003", ["p_topic", *TOPIC]),
    ("create_consumer('t', 'n', p_where => '$.data >')", "42601", ["jsonpath"]),
    ("create_consumer('t', 'n', p_where => '$.data > $limit')", "PQ003", ["p_where", "must not contain variables"]),
    ("create_consumer('t', 'c', p_topic => 'a', p_if_not_exists => true)", "PQ006", ["already exists", "filter of a consumer cannot change"]),
    ("test_topic('a..b', 'x')", "PQ003", ["p_pattern", "'a..b'"]),
    ("test_topic(null, 'x')", "PQ003", ["p_pattern", "null", *TOPIC]),
    ("bind('t', '.a', 't')", "PQ003", ["p_topic", "'.a'"]),
    ("bind('t', null, 't')", "PQ003", ["p_topic", "null"]),
    ("bind('t', 'a', 't')", "PQ003", ["p_to_stream", "'t'", "cycle"]),
    ("bind('t', 'a', 'j')", "PQ003", ["p_to_stream", "kind text", "'j'"]),
    ("create_consumer('t', 'n', p_ordering => 'fifo')", "PQ003", ["p_ordering", "'fifo'", *ORDERING]),
    ("create_consumer('t', 'n', p_ordering => null)", "PQ003", ["null", *ORDERING]),
    ("create_consumer('t', 'n', p_settings => '{\"max_deliver_count\": 0}')", "PQ003", ["at least 1, or never, not 0"]),
    ("create_consumer('t', 'n', p_settings => '{\"max_deliver_count\": -1}')", "PQ003", ["at least 1, or never, not -1"]),
    ("create_consumer('t', 'n', p_settings => null)", "PQ003", ["p_settings must be a JSON object", '{"backoff": null}, not null']),
    ("create_consumer('t', 'n', p_settings => '{\"visibility_timeout\": \"0\"}')", "PQ003", ["p_settings: visibility_timeout", "longer than 0", "up to 10 years", '"0"']),
    *((f"create_consumer('t', 'n', p_ordering => '{ordering}', p_settings => '{settings}')", "PQ003", ["p_settings", says]) for ordering, settings, says in (
        ("none", '{"per_key_capacity": 0}', "at least 1, not 0"),
        ("none", '{"per_key_capacity": "many"}', "at least 1, not"),
        ("none", '{"per_key_capacity": 1, "on_full": "drop_oldest"}', "per_key_capacity rejects messages"),
        ("none", '{"per_key_capacty": 1}', "Did you mean per_key_capacity"),
        ("none", '{"per_key_latest": 2}', "true or false, not 2"),
        ("none", '{"per_key_latest": true, "per_key_capacity": 1}', "per_key_latest replaces earlier ones"),
        ("none", '{"per_key_lates": true}', "Did you mean per_key_latest"),
        ("none", '{"per_key_limit": 0}', "at least 1"),
        ("none", '{"per_key_burst": 2}', "requires per_key_interval"),
        ("key", '{"per_key_interval": "0 s"}', "longer than 0"),
        ("stream", '{"fair": true}', "does not use keys"),
    )),
    ("create_consumer('t', 'n', p_settings => '{\"visibility_timeout\": \"-1 s\"}')", "PQ003", ["-1 s"]),
    ("create_consumer('t', 'n', p_settings => '{\"visibility_timeout\": \"11 years\"}')", "PQ003", ["11 years"]),
    ("create_consumer('t', 'c')", "PQ006", ["'c'", "'t'", "already exists", "Set p_if_not_exists", "use alter_consumer"]),
    ("create_consumer('t', 'c', p_ordering => 'key', p_if_not_exists => true)", "PQ006", ["ordering none", "cannot change: use another name"]),
    # reading without claiming
    ("start_offset('t', 'soon')", "PQ003", ["p_start", "'soon'", *START]),
    ("read_to('t', '[1]')", "PQ003", ["p_offset", "not an offset"]),
    ("read_to('t', '{\"stream\": \"t\"}')", "PQ003", ["p_offset", "no stream or incarnation"]),
    ("read_to('t', null, 0)", "PQ003", ["p_max", "at least 1, not 0"]),
    ("end_offset('t', null, 'latest')", "PQ003", ["p_offset", "not an offset"]),
    ("end_offset('t', pgqueue.start_offset('t'), 'soon')", "PQ003", ["p_end", "'soon'", *START]),
    ("offset_lag('t', null)", "PQ003", ["p_offset", "not an offset", "The value is null."]),
    ("size_between('t', null, null)", "PQ003", ["p_from", "not an offset"]),
    ("size_between('t', pgqueue.start_offset('t'), null)", "PQ003", ["p_to", "not an offset"]),
    ("read_plan('t', null, null)", "PQ003", ["p_from", "not an offset"]),
    ("read_plan('t', pgqueue.start_offset('t'), null)", "PQ003", ["p_to", "not an offset"]),
    ("read('t', '7')", "PQ003", ["p_offset", "not an offset"]),
    ("read('t', pgqueue.start_offset('j'))", "PQ005", ["p_offset", "stream 'j', not to stream 't'"]),
    ("read('t', null, 0)", "PQ003", ["p_max", "1 to 100000, not 0"]),
    # groups
    ("create_group('d', '')", "PQ003", ["''", *NAME]),
    ("create_group('d', 'x', 0)", "PQ003", ["p_partitions", "not 0"]),
    ("create_group('d', 'x', null)", "PQ003", ["p_partitions", "null"]),
    ("create_group('d', 'x', 2, 'soon')", "PQ003", ["p_start", "'soon'", *START]),
    ("create_group('d', 'g', 2)", "PQ006", ["'g'", "already exists", "Set p_if_not_exists"]),
    ("create_group('t', 'c', 2)", "PQ006", ["'c'", "not a group", "Use another name"]),
    ("create_group('d', 'g', 3, p_if_not_exists => true)", "PQ006", ["2 partitions, not 3"]),
    ("seek('d', 'g', 'soon')", "PQ003", ["p_to", "'soon'", *START]),
    ("lease_partitions('d', 'no', 'w')", "PQ002", ["unknown group 'no'", "create_group", "'g'"]),
    ("lease_partitions('d', 'g', null)", "PQ003", ["p_worker", "null"]),
    ("lease_partitions('d', 'g', 'w', '0')", "PQ003", ["p_lease", *TIMEOUT]),
    ("lease_partitions('d', 'g', 'w', '9 years')", "PQ003", ["p_lease", "at most 1 day, not '9 years'"]),
    ("commit_offset(999, '{1,1}')", "PQ012", ["999", "another worker"]),
    ("commit_offset(null, null)", "PQ012", ["null", "another worker"]),
    ("commit_offset(1, '{1}')", "PQ003", ["p_offset", "pair"]),
    ("note_offset('d', 'no', '{}')", "PQ002", ["unknown group 'no'", "create_group", "'g'"]),
    ("note_offset('d', 'g', '{}')", "PQ006", ["'g'", "it has", "partitions", "of one partition"]),
    ("plan_partitions('d', 'g', null)", "PQ003", ["p_lease_ids", "not null"]),
    ("plan_partitions('d', 'g', '{}', 0)", "PQ003", ["p_max", "1 to 1000000, not 0"]),
    ("plan_partitions('d', 'g', '{}', 1000001)", "PQ003", ["p_max", "1 to 1000000, not 1000001"]),
    ("plan_partitions('d', 'g', '{}', null)", "PQ003", ["p_max", "1 to 1000000, not null"]),
    ("read_partitions('d', 'g', null)", "PQ003", ["p_lease_ids", "not null"]),
    ("read_partitions('d', 'g', '{}', 0)", "PQ003", ["p_max", "1 to 1000000, not 0"]),
    ("read_partitions('d', 'g', '{}', 1000001)", "PQ003", ["p_max", "1 to 1000000, not 1000001"]),
    ("read_partitions('d', 'g', '{}', null)", "PQ003", ["p_max", "1 to 1000000, not null"]),
    # send
    ("send('t', null)", "PQ004", ["'t'", "text", "must have text as p_data"]),
    ("send('t', 'x', p_data_bytes => 'x')", "PQ004", ["'t'", "and no bytes"]),
    ("send('t', null, p_data_bytes => 'x')", "PQ004", ["'t'", "must have text as p_data"]),
    ("send('j', '{\"a\": }')", "PQ004", ["'j'", "not valid JSON", "of 7 bytes"]),
    ("send('j', '')", "PQ004", ["'j'", "not valid JSON"]),
    ("send('j', null)", "PQ004", ["'j'", "json", "must have text as p_data"]),
    ("send('b', 'x')", "PQ004", ["'b'", "binary", "p_data_bytes"]),
    ("send('b', null)", "PQ004", ["'b'", "p_data_bytes"]),
    ("send('b', 'x', p_data_bytes => 'x')", "PQ004", ["'b'", "and no text"]),
    (f"send('t', 'x', {LONG_KEY})", "PQ003", ["p_key"]),
    ("send('t', repeat('x', 16777217))", "PQ004", ["'t'", "at most 16777216 bytes, not 16777217"]),
    ("send('b', null, p_data_bytes => decode(repeat('00', 16777217), 'hex'))", "PQ004", ["'b'", "not 16777217"]),
    ("send('t', 'x', p_headers => jsonb_build_object('h', repeat('x', 65536)))", "PQ003", ["p_headers", "65536 bytes", "not 65545 bytes"]),
    ("send('t', 'x', p_headers => (repeat('{\"\":', 101) || '1' || repeat('}', 101))::jsonb)", "PQ003", ["p_headers", "100 levels, not deeper"]),
    ("send('t', 'x', p_headers => ('{\"h\":' || repeat('[', 100) || '1' || repeat(']', 100) || '}')::jsonb)", "PQ003", ["not deeper"]),
    ("send('t', 'x', p_headers => '[1, 2]')", "PQ003", ["p_headers", "JSON object", "type array"]),
    ("send('t', 'x', p_headers => '\"h\"')", "PQ003", ["p_headers", "JSON object", "type string"]),
    ("send('j', '1', p_headers => 'null')", "PQ003", ["p_headers", "JSON object"]),
    ("send('b', null, p_headers => '7', p_data_bytes => 'x')", "PQ003", ["p_headers", "type number"]),
    ("send('t', 'x', p_priority => 32768)", "PQ003", ["not 32768", *PRIORITY]),
    ("send('t', 'x', p_priority => -32769)", "PQ003", ["not -32769", *PRIORITY]),
    ("send('t', 'x', p_priority => null)", "PQ003", ["not null", *PRIORITY]),
    ("send('t', 'x', p_deliver_at => 'infinity')", "PQ003", ["p_deliver_at", "not infinity"]),
    ("send('t', 'x', p_deliver_at => '-infinity')", "PQ003", ["p_deliver_at", "not -infinity"]),
    ("send('t', 'x', p_consumers => '{c, null}')", "PQ002", ["null", *RECEIVERS]),
    ("send('j', '1', p_consumers => '{c}')", "PQ002", ["'c'", *RECEIVERS]),
    ("send('t', 'x', p_dedup_key => 'k')", "PQ003", ["'t' has no dedup_window", "alter_stream('t', '{\"dedup_window\": \"1 day\"}')"]),
    ("send('d', 'x', p_dedup_key => '')", "PQ003", ["p_dedup_key", "must be null or 1 to 1024 bytes, not 0"]),
    (f"send('d', 'x', p_dedup_key => {LONG_KEY})", "PQ003", ["p_dedup_key", "must be null or 1 to 1024 bytes, not 12800"]),
    ("send_batch('t', '{x}', p_dedup_keys => '{k}')", "PQ003", ["'t' has no dedup_window"]),
    ("send_batch('d', '{x,y}', p_dedup_keys => '{k}')", "PQ003", ["p_dedup_keys", "2 messages", ", 1 dedup key"]),
    ("send_batch('d', '{x,y}', p_dedup_keys => '{{k},{l}}')", "PQ003", ["p_dedup_keys", "one dimension"]),
    ("send_batch('d', '{x,y}', p_dedup_keys => '{k,\"\"}')", "PQ003", ["p_dedup_key", "not 0"]),
    # waiting
    # send_batch
    ("send_batch('t', null)", "PQ003", ["p_data", "null", "array"]),
    ("send_batch('t', '{x, null}')", "PQ004", ["'t'", "must have text as p_data"]),
    ("send_batch('t', '{{a, b}, {c, d}}')", "PQ003", ["p_data"]),
    ("send_batch('t', '{x, y}', '{k}')", "PQ003", ["p_keys", "2 messages, 1 key, no headers, no binary payloads, no dedup keys"]),
    ("send_batch('t', '{x}', '{k, l}')", "PQ003", ["1 message, 2 keys"]),
    ("send_batch('t', '{x}', '{}')", "PQ003", ["1 message, 0 keys"]),
    (f"send_batch('t', '{{x}}', array[{LONG_KEY}])", "PQ003", ["p_keys"]),
    ("send_batch('t', '{x}', p_headers => array['{}', '{}']::jsonb[])", "PQ003", ["p_headers", "2 headers"]),
    ("send_batch('t', '{x, y}', p_headers => array['{}', '[]']::jsonb[])", "PQ003", ["p_headers", "type array"]),
    ("send_batch('t', '{x}', p_data_bytes => '{x}')", "PQ004", ["'t'", "and no bytes"]),
    ("send_batch('t', null, p_data_bytes => '{x}')", "PQ004", ["'t'", "must have text as p_data"]),
    ("send_batch('t', '{x}', p_data_bytes => '{x, y}')", "PQ003", ["p_data_bytes", "1 message, no keys, no headers, 2 binary payloads"]),
    ("send_batch('t', array['x', repeat('x', 16777217)])", "PQ004", ["'t'", "at most 16777216 bytes, not 16777217"]),
    ("send_batch('b', null, p_data_bytes => array[decode(repeat('00', 16777217), 'hex')])", "PQ004", ["not 16777217"]),
    ("send_batch('t', '{x}', p_headers => array[jsonb_build_object('h', repeat('x', 65536))])", "PQ003", ["not 65545 bytes"]),
    ("send_batch('j', array['1', '{'])", "PQ004", ["'j'", "not valid JSON", "of 1 byte, is"]),
    ("send_batch('b', '{x}')", "PQ004", ["'b'", "p_data_bytes"]),
    ("send_batch('b', null, p_data_bytes => '{x, null}')", "PQ004", ["'b'", "p_data_bytes"]),
    ("send_batch('t', '{x}', p_priority => 40000)", "PQ003", ["not 40000", *PRIORITY]),
    ("send_batch('t', '{x}', p_priority => null)", "PQ003", ["not null", *PRIORITY]),
    ("send_batch('t', '{x}', p_deliver_at => 'infinity')", "PQ003", ["p_deliver_at", "infinity"]),
    # settling
    ("nack({claim}, p_delay => '-1 s')", "PQ003", ["p_delay", "'-00:00:01'", *DELAY]),
    ("nack({claim}, p_delay => '11 years')", "PQ003", ["'11 years'", *DELAY]),
    ("extend({claim}, '0')", "PQ003", ["p_by", "'00:00:00'", *TIMEOUT]),
    ("extend({claim}, '-1 s')", "PQ003", ["p_by", "'-00:00:01'", *TIMEOUT]),
    ("extend({claim}, '11 years')", "PQ003", ["p_by", "'11 years'", *TIMEOUT]),
    # retention
    ("set_retention('t', '0')", "PQ003", ["p_for", "'00:00:00'", *AGE]),
    ("set_retention('t', '-1 day')", "PQ003", ["p_for", "'-1 days'", *AGE]),
    ("set_retention('t', '400000 years')", "PQ003", ["p_for", "too long", "'400000 years'"]),
    ("set_retention('t', '60000 years')", "PQ003", ["p_for", "too long", "'60000 years'"]),
    ("set_retention('t', p_dead => '0')", "PQ003", ["p_dead", "'00:00:00'", *AGE]),
    ("set_retention('t', p_messages => 0)", "PQ003", ["p_messages", "at least 1, not 0"]),
    ("set_retention('t', p_bytes => 0)", "PQ003", ["p_bytes", "at least 1, not 0"]),
    ("set_retention('t', p_done => null)", "PQ003", ["p_done", "true or false", "null"]),
    ("set_retention('t', '1 day', p_unread => 'lose')", "PQ003", ["p_unread", "keep or drop", "'lose'"]),
    ("set_retention('t', '1 day', p_unread => null)", "PQ003", ["p_unread", "keep or drop", "null"]),
    ("set_archive('t', 'a')", "PQ003", ["p_uri", "absolute path", "'a'"]),
    ("set_archive('t', 's3://me:secret@b/a')", "PQ003", ["p_uri must not contain a user or a password"]),
    ("set_archive('t', 's3://b/a?endpoint_override=me')", "PQ003", ["p_uri must not contain options", "?"]),
    ("set_archive('t', '/a/../b')", "PQ003", ["p_uri", "without spaces", "..", "'/a/../b'"]),
    ("set_archive('t', '/a', '0')", "PQ003", ["p_keep", "'00:00:00'", *AGE]),
    ("set_archive('t', null)", "PQ003", ["p_stream 't' has no archive", "stream_archives"]),
    ("drop_archive('t')", "PQ003", ["p_stream 't' has no archive", "stream_archives"]),
    *((call, "PQ008", ["another exporter has ended this attempt"]) for call in (
        "export_slices(null)", f"export_slices('{READER}')", f"export_ranges('{READER}', 0, 1, 0, 1)",
        f"end_export('{READER}', '[]')",
    )),
    ("set_retention('t', p_done => true, p_unread => 'drop')", "PQ003", ["p_unread", "an age, a count or a size"]),
    ("maintain(null)", "PQ003", ["p_staged_age", "null", *TIMEOUT]),
    ("maintain('0')", "PQ003", ["p_staged_age", "'00:00:00'", *TIMEOUT]),
    ("maintain('-1 day')", "PQ003", ["p_staged_age", "'-1 days'", *TIMEOUT]),
    ("maintain(p_reader_age => '0')", "PQ003", ["p_reader_age", "'00:00:00'", *TIMEOUT]),
    # the source
    ("reader_claim(null, {consumer}, 0, 0)", "PQ003", ["p_reader", "must not be null"]),
    ("reader_claim({new}, {group}, 0, 0)", "PQ006", ["'g' is a group"]),
    ("reader_claim({new}, {consumer}, null, 0)", "PQ003", ["p_start_claim", "must not be null"]),
    ("reader_claim({new}, {consumer}, 0, null)", "PQ003", ["p_start_messages", "must not be null"]),
    ("reader_claim({new}, {consumer}, -1, 0)", "PQ003", ["p_start_claim", "-1"]),
    ("reader_claim({new}, {consumer}, 0, -5)", "PQ003", ["p_start_messages", "-5"]),
    ("reader_claim({new}, {consumer}, 0, 0, 0)", "PQ003", ["p_max", "at least 1, not 0"]),
    ("reader_claim({new}, {consumer}, 0, 0, -1)", "PQ003", ["p_max", "at least 1, not -1"]),
    ("reader_claim({new}, {consumer}, 0, 0, 1, '0')", "PQ003", ["p_visibility_timeout", "'00:00:00'", *TIMEOUT]),
    ("reader_claim({new}, {consumer}, 0, 0, 1, '-1 s')", "PQ003", ["'-00:00:01'", *TIMEOUT]),
    ("reader_claim({new}, {consumer}, 7, 9)", "PQ005", ["claim 7", "another database"]),
    ("reader_claim({reader}, {other}, 0, 0)", "PQ005", ["consumer 'c' of stream 't'", "'o'"]),
    ("reader_claim({reader}, {consumer}, 900000000000000000, 9)", "PQ005", ["claim 900000000000000000", "ahead"]),
    ("reader_claim({new}, {consumer}, 0, 0, p_max_bytes => 0)", "PQ003", ["p_max_bytes", "at least 1, not 0"]),
    ("reader_ack(null, {consumer}, 0)", "PQ003", ["p_reader", "must not be null"]),
    ("reader_ack({reader}, {consumer}, null)", "PQ003", ["p_start_claim", "must not be null"]),
    ("reader_ack({new}, {consumer}, 7)", "PQ005", ["claim 7", "another database"]),
    ("reader_ack({reader}, {other}, 1)", "PQ005", ["consumer 'c' of stream 't'", "'o'"]),
    ("reader_ack({reader}, {consumer}, 900000000000000000)", "PQ005", ["claim 900000000000000000", "ahead"]),
    ("reader_release(null, {consumer}, 0)", "PQ003", ["p_reader", "must not be null"]),
    ("reader_release({reader}, {consumer}, null)", "PQ003", ["p_start_claim", "must not be null"]),
    ("reader_release({new}, {consumer}, 7)", "PQ005", ["claim 7", "another database"]),
    ("reader_fork(null, {consumer}, 0, 0)", "PQ003", ["p_reader", "must not be null"]),
    ("reader_fork({reader}, {consumer}, null, 0)", "PQ003", ["p_start_claim", "must not be null"]),
    ("reader_fork({reader}, {consumer}, 0, null)", "PQ003", ["p_start_messages", "must not be null"]),
    ("reader_fork({new}, {consumer}, 7, 7)", "PQ005", ["claim 7", "another database"]),
    ("reader_resume(null, {consumer}, 0, 0)", "PQ003", ["p_reader", "must not be null"]),
    ("reader_resume({reader}, {consumer}, null, 0)", "PQ003", ["p_start_claim", "must not be null"]),
    ("reader_resume({reader}, {consumer}, 0, null)", "PQ003", ["p_end_claim", "must not be null"]),
    ("reader_resume({reader}, {consumer}, 0, 0, null, 0)", "PQ003", ["p_quarantine_after", "not 0"]),
    ("reader_resume({reader}, {consumer}, 0, 0, null, null, '0')", "PQ003", ["p_visibility_timeout", *TIMEOUT]),
    ("reader_extend({reader}, '-1 s')", "PQ003", ["p_visibility_timeout", "'-00:00:01'", *TIMEOUT]),
    ("reader_resume({new}, {consumer}, 0, 7)", "PQ005", ["claim 7", "another database"]),
    ("reader_resume({reader}, {other}, 0, 1)", "PQ005", ["consumer 'c' of stream 't'", "'o'"]),
    ("reader_resume({reader}, {consumer}, 0, 900000000000000000)", "PQ005", ["claim 900000000000000000", "ahead"]),
    # the sink
    ("reserve({t}, 0)", "PQ003", ["p_count", "1 to 10000000, not 0"]),
    ("reserve({t}, -1)", "PQ003", ["1 to 10000000, not -1"]),
    ("reserve({t}, null)", "PQ003", ["1 to 10000000, not null"]),
    ("publish_written('t', '{[1,3)}')", "PQ003", ["p_seqs", "reserved", "not {[1,3)}"]),
    ("publish_written('t', '{[1,3)}', 40000)", "PQ003", ["not 40000", *PRIORITY]),
    ("publish_written('t', '{[1,3)}', null)", "PQ003", ["not null", *PRIORITY]),
    ("publish_written('t', '{[1,3)}', 0, 'infinity')", "PQ003", ["p_deliver_at", "not infinity"]),
    ("send_captured(0, '{k}', array['1'::json], '{null}', '{1}')", "PQ001", ["was dropped"]),
    ("send_captured({b}, '{k}', array['1'::json], '{null}', '{1}')", "PQ004", ["binary"]),
    ("send_captured({t}, null, null, null, null)", "PQ003", ["p_data"]),
    ("send_captured({t}, '{}', '{}', '{}', '{}')", "PQ003", ["p_data"]),
    ("send_captured({t}, '{k,l}', array['1'::json, null], '{null}', '{2}')", "PQ003", ["p_data"]),
    ("send_captured({t}, '{k}', array['1'::json, '2'], '{null}', '{2}')", "PQ003", ["p_keys"]),
    ("send_captured({t}, '{k,l}', array['1'::json, '2'], '{null}', '{1}')", "PQ003", ["p_counts"]),
    ("send_captured({t}, '{k,l}', array['1'::json, '2'], '{null,null}', '{3,-1}')", "PQ003", ["p_counts"]),
    ("send_captured({t}, '{k,l}', array['1'::json, '2'], '{null,null}', '{2,null}')", "PQ003", ["p_counts"]),
    ("send_captured({t}, '{k}', array['1'::json], array['1'::jsonb], '{1}')", "PQ003", ["p_headers"]),
    ("send_captured({t}, '{k}', array['1'::json], '{null}', '{1}', 'pg_class')", "PQ003", ["not captured to stream"]),
    ("send_captured(0, '{k}', array['1'::json], '{null}', '{1}', 'pg_class')", "PQ003", ["to stream number 0"]),
    (f"send_captured({{t}}, array[{LONG_KEY}], array['1'::json], '{{null}}', '{{1}}')", "PQ003", ["p_key"]),
    ("stage('s', null, {t}, '{[1,3)}')", "PQ003", ["p_batch", "null"]),
    ("stage('s', 1, {t}, '{[1,3)}')", "PQ003", ["p_seqs", "reserved", "not {[1,3)}"]),
    ("stage('s', 1, {t}, '{[1,9223372036854775807)}')", "PQ003", ["p_seqs", "reserved"]),
    ("stage('s', 9223372036854775807, {t}, '{[1,3)}')", "PQ003", ["p_batch must be 0 to 1000000000000"]),
    ("stage('txn:s', 9223372036854775807, {t}, '{[1,3)}')", "PQ003", ["p_batch must be 0 to 4000000000000000000"]),
    ("publish_staged('s', 9223372036854775807, {t}, '{}', 0)", "PQ003", ["p_batch must be 0 to 1000000000000"]),
    ("stage('s', 1, {t}, '{[1,3)}', 40000)", "PQ003", ["not 40000", *PRIORITY]),
    ("stage('s', 1, {t}, '{[1,3)}', null)", "PQ003", ["not null", *PRIORITY]),
    ("stage('s', 1, {t}, '{[1,3)}', 0, 'infinity')", "PQ003", ["p_deliver_at", "infinity"]),
    ("stage('s', 1, {t}, '{[1,3)}', p_expires_at => 'infinity')", "PQ003", ["p_expires_at must be a finite time"]),
    *(
        (f"{name}('txn:a', 0, {actions})", code, says)
        for name, mine, other in (("settle_messages", "ack", "redrive"), ("revive_messages", "retry", "ack"))
        for actions, code, says in (
            ("null", "PQ003", ["p_actions", "null"]),
            ("'5'", "PQ003", ["p_actions", "number"]),
            (action(other), "PQ003", ["p_action must be", f"not '{other}'"]),
            ("'[{\"stream\": \"t\", \"consumer\": \"c\", \"seqs\": \"{[1,2)}\"}]'", "PQ003", ["p_action must be", "not null"]),
            (f"'[{{\"action\": \"{mine}\", \"stream\": \"t\", \"consumer\": \"c\"}}]'", "PQ003", ["p_seqs", "not null"]),
            (action(mine, stream="d", consumer="g"), "PQ006", ["'g' is a group"]),
            (action(mine, stream="no"), "PQ001", ["'no'", *UNKNOWN_STREAM]),
            (action(mine, consumer="no"), "PQ002", ["'no'", *UNKNOWN_CONSUMER]),
            (action(mine, seqs="{}"), "PQ003", ["p_seqs", "not {}"]),
            (action(mine, seqs="{[9223372036854775807,9223372036854775807]}"), "PQ003", ["p_seqs", "last bigint"]),
            (action(mine, seqs="{[-9223372036854775808,9223372036854775807)}"), "PQ003", ["p_seqs", "at most"]),
            (action(mine, seqs="{[-9223372036854775808,0)}"), "PQ003", ["p_seqs", "at most"]),
            (action(mine, seqs="{[1,9223372036854775807)}"), "PQ003", ["p_seqs", "at most"]),
            (action(mine, delay="200000000000 years"), "PQ003", ["p_delay"]),
            (action(mine, seqs="{[1,)}"), "PQ003", ["p_seqs", "not {[1,)}"]),
            (action(mine, delay="-1 s"), "PQ003", ["p_delay", *DELAY, "'-00:00:01'"]),
            (f"{action(mine)} || {action(mine, reason='r')}", "PQ003", ["message 1 of consumer 'c'", "two actions"]),
        )
    ),
    ("check_timeout('option t', null)", "PQ003", ["option t must be an interval", "null"]),
    ("check_timeout('option t', '-1 s')", "PQ003", ["option t must be an interval", "'-00:00:01'"]),
    *((f"as_interval('p_every', '{text}')", "PQ003", ["p_every must be an interval with a unit: 500 ms, 30 s or 5 minutes, not '", text]) for text in (
        "1 parsec", "soon", "", "999999999999 days",
    )),
    ("as_jsonpath('p_where', '$[')", "PQ003", ["p_where must be a jsonpath", "'$['"]),
    ("revive_messages('txn:a', -1, '[]')", "PQ003", ["p_batch", "not 'txn:a' and -1"]),
    ("unstage('s', -1, '{}')", "PQ003", ["p_batch must be 0 to 1000000000000"]),
    ("unstage('s', 0, null)", "PQ003", ["p_staged", "null"]),
    # tables: what a target may be is in test_table_targets.py
    ("open_table(null)", "PQ003", ["p_target must be an object with table, columns", "null"]),
    ("open_table('[]')", "PQ003", ["p_target", "[]"]),
    ("open_table('{\"table\": \"public.x\"}')", "PQ003", ["p_target", "columns with name and type"]),
    ("open_table('{\"table\": \"public.x\", \"columns\": [{\"name\": \"a\"}]}')", "PQ003", ["p_target"]),
    *(
        (f"open_table('{{\"columns\": [], \"{name}\": {keys}}}')", "PQ003", [name, "of names of columns"])
        for name in ("merge_keys", "allow_rounding")
        for keys in ('[["id"]]', "[1]", "[null]", '"id"')
    ),
    ("open_table('{\"table\": null, \"columns\": []}')", "PQ003", ["p_table", "not null"]),
    ("open_table('{\"table\": \"x\", \"columns\": []}')", "PQ003", ["p_table", "such as public.bills", "'x'"]),
    ("open_table('{\"table\": \"pgqueue.streams\", \"columns\": []}')", "PQ003", ["a table of the queue"]),
    ("open_table('{\"table\": \"public.x\", \"columns\": []}', 'nobody')", "PQ003", ["p_role must be a role", "'nobody'"]),
    ("open_table('{\"table\": \"public.x\", \"columns\": []}', null)", "PQ003", ["p_role must be a role", "null"]),
    ("open_table_write(0, 's', 0, '{\"columns\": []}')", "PQ003", ["p_write_no", "not 0"]),
    ("open_table_write(null, 's', 0, '{\"columns\": []}')", "PQ003", ["p_write_no", "null"]),
    ("open_table_write(1, 's', -1, '{\"columns\": []}')", "PQ003", ["p_batch must be 0 to 1000000000000"]),
    ("open_table_write(1, 's', 0, null)", "PQ003", ["p_target", "null"]),
    ("open_table_write(1, 's', 0, '{\"columns\": []}', 'nobody')", "PQ003", ["p_role must be a role", "'nobody'"]),
    ("begin_table_batch(1, 's', -1, 'public.x', 1)", "PQ003", ["p_batch must be 0 to 1000000000000"]),
    ("begin_table_batch(1, 's', 0, '', 1)", "PQ003", ["p_table", "''"]),
    ("begin_table_batch(1, 's', 0, null, null)", "PQ003", ["p_table", "not null and null"]),
    ("begin_table_batch(1, 's', 0, 'public.x', -1)", "PQ003", ["p_rows", "-1"]),
    ("begin_table_batch(null, 's', 0, 'public.x', 1)", "PQ008", ["its staged rows for table public.x are gone"]),
    ("apply_table_batch(1, 's', 0, 'x', '{}', 0)", "PQ003", ["p_table must be a name of open_table()", "'x'"]),
    ("apply_table_batch(1, 's', 0, null, '{}', 0)", "PQ003", ["p_table", "null"]),
    ("apply_table_batch(1, 's', 0, 'public.x', null, 0)", "PQ003", ["p_chunks", "null"]),
    ("apply_table_batch(1, 's', 0, 'public.x', '{}', 0, null)", "PQ003", ["p_path", "null"]),
    ("apply_table_batch(1, 's', 0, 'public.x', '{}', 0)", "PQ008", ["table public.x was dropped"]),
    ("apply_table_batch(1, 's', -1, 'pg_catalog.pg_class', '{}', 0)", "PQ003", ["p_batch must be 0 to 1000000000000"]),
    ("apply_table_batch(1, 's', 0, 'pg_catalog.pg_class', '{}', -1)", "PQ003", ["p_rows", "-1"]),
    ("apply_table_batch(null, 's', 0, 'pg_catalog.pg_class', '{}', 1)", "PQ008", ["are gone"]),
    ("drop_table_write(null)", "PQ003", ["p_write_no", "null"]),
    ("publish_staged('s', null, {t}, array[{staged}], 1)", "PQ003", ["p_batch", "null"]),
    ("publish_staged('s', 0, null, array[{staged}], 1)", "PQ008", ["batch 0", "0 of 1 staged"]),
    ("publish_staged('s', 0, {j}, array[{staged}], 1)", "PQ008", ["batch 0", "sink s", "0 of 1"]),
    ("publish_staged('s', 0, {t}, null, 0)", "PQ003", ["p_staged", "null"]),
    ("publish_staged('s', 0, {t}, array[{staged}], null)", "PQ003", ["p_rows", "null"]),
    ("publish_staged('s', 0, {t}, array[{staged}], 0)", "PQ008", ["1 of 0 messages"]),
    ("publish_staged('s', 0, {t}, array[{staged}], 2)", "PQ008", ["1 of 2 messages"]),
    ("publish_staged('s', 0, {t}, array[{staged}, 99], 1)", "PQ008", ["1 of 2 staged chunks"]),
    ("publish_staged('s', 0, {t}, array[{staged}, {staged}], 1)", "PQ008", ["1 of 2 staged chunks"]),
    ("publish_staged('s', 0, {t}, '{}', 1)", "PQ008", ["0 of 1 messages"]),
    ("publish_staged('x', 0, {t}, array[{staged}], 1)", "PQ008", ["sink x", "0 of 1"]),
    ("publish_staged('s', 1, {t}, array[{staged}], 1)", "PQ008", ["batch 1", "0 of 1"]),
]  # fmt: skip

# claim and receive are the same
CASES += [
    (f"{function}({arguments})", sqlstate, names)
    for function in ("claim", "receive")
    for arguments, sqlstate, names in [
        ("'no', 'c'", "PQ001", ["'no'", *UNKNOWN_STREAM]),
        ("null, 'c'", "PQ001", ["null", *UNKNOWN_STREAM]),
        ("'t', 'no'", "PQ002", ["'no'", *UNKNOWN_CONSUMER]),
        ("'t', null", "PQ002", ["null", *UNKNOWN_CONSUMER]),
        ("'j', 'c'", "PQ002", ["'c'", "of stream 'j'", "Available: none"]),
        ("'d', 'g'", "PQ006", ["'g' is a group", "lease_partitions"]),
        ("'t', 'c', 0", "PQ003", ["p_max", "at least 1, not 0"]),
        ("'t', 'c', -1", "PQ003", ["p_max", "at least 1, not -1"]),
        ("'t', 'c', null", "PQ003", ["p_max", "at least 1, not null"]),
        ("'t', 'c', 1, '0'", "PQ003", ["p_visibility_timeout", "'00:00:00'", *TIMEOUT]),
        ("'t', 'c', 1, '-1 s'", "PQ003", ["p_visibility_timeout", "'-00:00:01'", *TIMEOUT]),
        ("'t', 'c', 1, '11 years'", "PQ003", ["'11 years'", *TIMEOUT]),
    ]
]

# They decide by what they see after they have a lock.
READ_COMMITTED_ONLY = [
    "claim('t', 'c')", "claim('t', 'c', 1, '1 s')", "receive('t', 'c')",
    "receive_where('t', 'c', '$')", "ack({claim})", "ack({claim}, array[1])", "nack({claim})",
    "defer({claim})", "extend({claim})", "dead_letter({claim})", "retry('t', 'c')",
    "redrive('t', 'c')", "purge_dead('t', 'c')", "cancel('t', 'c', '{1}')",
    "postpone('t', 'c', '{1}', now())", "seek('t', 'c', 'latest')",
    "replay('t', 'c', 'earliest')", "reader_claim({reader}, {consumer}, 0, 0)",
    "reader_resume({reader}, {consumer}, 0, 0)", "reader_ack({reader}, {consumer}, 0)",
    "reader_release({reader}, {consumer}, 0)", "settle_messages('txn:a', 0, '[]')",
    "revive_messages('txn:a', 0, '[]')", "lease_partitions('d', 'g', 'w')",
    "plan_partitions('d', 'g', '{}')", "read_partitions('d', 'g', '{}')",
    "note_offset('d', 'alone', pgqueue.start_offset('d'))", "bind('t', 'a', 'u')",
    "create_schedule('t', 'h', '@daily', p_data => 'x')", "drop_schedule('t', 'h')",
    "pause_schedule('t', 'h')", "resume_schedule('t', 'h')", "capture('pg_class', 'j')",
    "release('pg_class', 'j')", "change_capture('pg_class', 'j', true)", "maintain()",
    "recover()",
]  # fmt: skip
"""Of those that claim, `test_beginning.py` asks."""


@pytest.fixture
def names(conn: Conn) -> Iterator[dict[str, Any]]:
    """A queue with something of everything, and the names of it that cases use.

    After a test, it is as it was.
    """
    t = value(conn, "create_stream", "t")
    j = value(conn, "create_stream", "j", "json")
    b = value(conn, "create_stream", "b", "binary")
    value(conn, "create_stream", "d", p_settings='{"dedup_window": "1 day"}')
    consumer = value(conn, "create_consumer", "t", "c")
    other = value(conn, "create_consumer", "t", "o")
    group = value(conn, "create_group", "d", "g", 2)
    value(conn, "create_group", "d", "alone", 1)
    conn.execute("select pgqueue.send_batch('t', '{x,y,z,w}')")
    claim = claim_of(call(conn, "receive", "t", "c", 2))
    call(conn, "reader_claim", READER, consumer, 0, 0, 1)
    with conn.transaction():
        (seq,) = internals.insert_messages(conn, t, 1)
        staged = value(conn, "stage", "s", 0, t, f"{{[{seq},{seq + 1})}}")
    before = content(conn)
    yield {
        "t": t,
        "j": j,
        "b": b,
        "consumer": consumer,
        "other": other,
        "group": group,
        "claim": claim,
        "staged": staged,
        "reader": f"'{READER}'",
        "new": f"'{NEW_READER}'",
    }
    assert content(conn) == before


def content(conn: Conn) -> dict[str, str]:
    """Everything that is stored, table by table."""
    tables = conn.execute(
        "select oid::regclass::text from pg_class"
        " where relnamespace = 'pgqueue'::regnamespace and relkind = 'r' order by 1"
    ).fetchall()
    rows = "select coalesce(jsonb_agg(t order by t::text), '[]')::text from {} t"
    return {table: one(conn, rows.format(table)) for (table,) in tables}


def refused(
    conn: Conn, call: str, names: dict[str, Any], level: str = "read committed"
) -> psycopg.Error | None:
    """The error of a call."""
    call = re.sub(r"\{(\w+)\}", lambda m: str(names.get(m[1], m[0])), call)
    conn.execute(f"begin transaction isolation level {level}".encode())
    try:
        # A call that is not refused is rolled back all the same, for the sake of the next case.
        conn.execute(f"select * from pgqueue.{call}".encode())
    except psycopg.Error as error:
        return error
    finally:
        conn.execute("rollback")
    return None


def test_each_call_is_refused_by_name_and_nothing_changes(
    conn: Conn, names: dict[str, Any]
) -> None:
    """(One test of all cases: `make mutants` asks which functions a test calls.)"""
    wrong = {}
    for case, sqlstate, says in CASES:
        if (error := refused(conn, case, names)) is None:
            wrong[case] = "is not refused"
            continue
        diag = error.diag
        text = f"{diag.message_primary}\n{diag.message_hint}\n{diag.message_detail}"
        named = all(words in text for words in says)
        if error.sqlstate != sqlstate or not named or "<NULL>" in text:
            wrong[case] = f"{error.sqlstate} {text}"
    assert not wrong


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.promise("guarantee: Isolation")
def test_another_isolation_level_is_refused(conn: Conn, names: dict[str, Any], level: str) -> None:
    wrong = {}
    for case in READ_COMMITTED_ONLY:
        error = refused(conn, case, names, level)
        hint = (error and error.diag.message_hint) or ""
        if (
            error is None
            or error.sqlstate != "PQ007"
            or f"read committed, not {level}" not in str(error)
            or "begin transaction isolation level read committed" not in hint
        ):
            wrong[case] = error
    assert not wrong


def test_every_function_that_needs_read_committed_is_tried_without(conn: Conn) -> None:
    headers = headers_in(schema.sql_directory())
    need_it = {name for name, header in headers.items() if "PQ007" in str(header.rest)}
    asking = conn.execute(
        "select proname from pg_proc where pronamespace = 'pgqueue'::regnamespace"
        " and prosrc like '%_pgqueue.check_isolation()%'"
    ).fetchall()
    tried = {call.partition("(")[0] for call in READ_COMMITTED_ONLY}
    assert need_it | {name for (name,) in asking} <= tried


def test_every_argument_has_a_case(conn: Conn) -> None:
    """A new function, or a new argument, needs a test here; or a reason why all is allowed."""
    anything = {
        **dict.fromkeys(
            [
                "create_stream.p_if_not_exists", "create_consumer.p_if_not_exists",
                "create_group.p_if_not_exists", "read_to.p_skip_trimmed", "read_plan.p_skip_trimmed",
                "commit_offset.p_release", "nack.p_backoff", "create_schedule.p_replace",
                "settle_messages.p_replayed", "settle_messages.p_compare",
                "revive_messages.p_compare", "stage.p_routed", "start_offset.p_archive",
                "end_offset.p_archive", "read_to.p_archive", "read_plan.p_archive",
                "offset_lag.p_archive", "size_between.p_archive",
            ],
            "a boolean, null is false",
        ),
        **dict.fromkeys(
            [
                f"{name}.{argument}"
                for name in ("read_dead", "redrive", "purge_dead")
                for argument in ("p_seqs", "p_reason", "p_before")
            ],
            "others are passed over, and null is all",
        ),
        **dict.fromkeys(
            ["test_topic.p_key", "nack.p_reason", "dead_letter.p_reason"], "any text"
        ),
        **dict.fromkeys(["ack.p_result", "defer.p_state", "dead_letter.p_details"], "any JSON"),
        "unbind.p_topic": "what is not bound is not unbound",
        "read_to.p_upto": "as reader_claim.p_upto_publication",
        "leave_group.p_worker": "who is no worker leaves nothing",
        "claim.p_ack": "a claim that is not live is warned of, as ack does",
        "receive.p_ack": "as claim.p_ack",
        "receive_where.p_ack": "as claim.p_ack",
        "start_waiting.p_pid": "null is not behind a pooler, another process is",
        "still_publishing.p_publishers": "those that are unknown publish nothing, and null is none",
        "listen_done.p_pid": "as start_waiting.p_pid",
        "scan.p_from": "null is from the first row, and what is not there is passed over",
        "scan.p_to": "as scan.p_from",
        "redrive.p_reset": "null is true",
        "retry.p_seqs": "others are passed over, and null is all that failed",
        "settle_messages.p_query_id": "a query that reads nothing here is nobody in particular",
        "reader_resume.p_process": "null is nobody in particular",
        "reader_extend.p_reader": "an unknown one has no claims",
        "reader_claim.p_upto_publication": "null is no bound, and an unknown one is a bound",
    }  # fmt: skip
    harmless = {
        **dict.fromkeys(
            [
                "schema_version", "create_roles", "is_restored", "numbers_behind", "recover",
                "open_streams", "begin_write", "export_streams",
            ],
            "has no arguments",
        ),
        **dict.fromkeys(
            [
                "last_publication", "consumer_backlog", "consumer_available", "recent_size",
                "reader_state", "consumer_lag", "reader_plan", "is_suspected",
                "reader_lost", "reader_others", "is_published", "was_truncated", "archive_files",
                "begin_export", "export_leftovers", "forget_leftover",
            ],
            "finds nothing for an unknown stream, consumer, reader, claim, sink or attempt",
        ),
        **dict.fromkeys(["capture", "release"], "its tables are made in test_capture"),
        **dict.fromkeys(
            ["change_capture", "execute_as", "capture_script"], "called by capture and release"
        ),
        "reader_query": "PQ009 is tested in test_readers",
        "maintain_all": "hands its arguments to maintain",
        "end_after": "asked by PySpark 4.0, with offsets that the source was given",
        "note_captures": "goes by what it finds",
        "lock_export": "locks a number",
        "begin_write_of": "any id: it is compared with those of earlier writes alone",
    }  # fmt: skip
    functions = conn.execute(
        "select proname, proargnames[1:pronargs] from pg_proc"
        " where pronamespace = 'pgqueue'::regnamespace"
    ).fetchall()
    tried = {call.partition("(")[0] for call, _, _ in CASES}
    assert {name for name, _ in functions} == tried | harmless.keys()
    for name, arguments in functions:
        cases = [c for c, _, _ in CASES if c.startswith(f"{name}(")]
        for position, argument in enumerate(arguments or [] if name in tried else []):
            assert f"{name}.{argument}" in anything or any(
                f"{argument} =>" in c or c.count(",") >= position for c in cases
            ), f"no case for {name}.{argument}"
