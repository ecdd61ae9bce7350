"""The hint for an unknown name: what it is called here, a similar name, or all names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Meaning(NamedTuple):
    """What other software has an option for, too.

    Attributes:
        ours: its names here, in any interface; none where it is no option.
        theirs: its names elsewhere.
        place: where it is, for an interface that does not have it.
    """

    ours: str
    theirs: str
    place: str

    def has(self, name: str) -> bool:
        return plain(name) in map(plain, f"{self.ours} {self.theirs}".split())


_SETTING = "it is a setting of the consumer, {}: alter_consumer, or pgqueue consumer set"
_OF_STREAM = "it is a setting of the stream, {}: alter_stream, or pgqueue stream set"
_OF_SEND = "it is an argument of send: {}"
_OF_RECEIVE = "it is an argument of receive: {}"
_OF_CREATE = "it is an argument of create_consumer: {}"
_OF_WORKER = "it is an option of a worker: {}"

MEANINGS = (
    Meaning(
        "max_deliver_count",
        "max_attempts attempts max_retries max_retry retries max_tries retry_limit retry_count "
        "max_receive_count max_delivery_count max_deliveries max_deliver delivery_limit "
        "max_read_ct",
        _SETTING,
    ),
    Meaning("backoff_base backoff", "retry_delay retry_backoff retry_interval delay", _SETTING),
    Meaning("backoff_cap", "max_retry_delay max_backoff retry_delay_max", _SETTING),
    Meaning(
        "visibility_timeout",
        "vt visibility lease lease_time lease_timeout lease_duration lock_duration ack_deadline "
        "ack_wait ack_timeout invisibility_timeout",
        _SETTING,
    ),
    Meaning(
        "",
        "dlq dead_letter dead_letters dead_letter_queue dead_letter_topic dead_letter_exchange "
        "redrive_policy",
        "a dead letter stays with its consumer: read_dead, or pgqueue dead list",
    ),
    Meaning(
        "stream",
        "topic topics topic_name queue queues queue_name subject channel",
        "it is called stream: a queue is a stream with a consumer",
    ),
    Meaning(
        "consumer",
        "group group_id group_name consumer_group subscription subscriber durable",
        "it is called consumer",
    ),
    Meaning(
        "deliver_at",
        "delay delay_seconds delay_ms deliver_after deliver_in eta countdown run_at run_after "
        "run_in scheduled_at schedule_at schedule_in start_after available_at not_before",
        _OF_SEND,
    ),
    Meaning(
        "expires_at",
        "ttl time_to_live message_ttl expires expire expires_in expire_in expiration",
        _OF_SEND,
    ),
    Meaning(
        "key",
        "partition_key message_group_id group_key ordering_key routing_key sharding_key",
        _OF_SEND,
    ),
    Meaning(
        "dedup_key",
        "unique_key job_key singleton_key idempotency_key message_deduplication_id "
        "deduplication_id queueing_lock",
        _OF_SEND,
    ),
    Meaning(
        "batch max_messages max",
        "batch_size qty quantity max_number_of_messages",
        "it is an argument of receive, max_messages; and an option of a worker, batch",
    ),
    Meaning(
        "wait",
        "wait_time wait_time_seconds poll_interval polling_interval poll_timeout "
        "max_poll_seconds idle_timeout",
        _OF_RECEIVE,
    ),
    Meaning(
        "concurrency",
        "threads workers max_workers num_workers parallelism slots tasks",
        _OF_WORKER,
    ),
    Meaning("prefetch", "prefetch_count qos", _OF_WORKER),
    Meaning("timeout", "time_limit task_timeout job_timeout execution_timeout", _OF_WORKER),
    Meaning("max_in_flight", "max_ack_pending global_concurrency", _SETTING),
    Meaning("max_backlog", "max_length max_queue_length x_max_length", _SETTING),
    Meaning("ordering", "fifo fifo_queue fifo_mode ordered", _OF_CREATE),
    Meaning("start", "auto_offset_reset from_beginning initial_position", _OF_CREATE),
    Meaning("where", "filter filter_expression filter_policy selector", _OF_CREATE),
    Meaning("max_bytes", "max_message_bytes maximum_message_size max_msg_size", _OF_STREAM),
    Meaning("dedup_window", "deduplication_interval duplicate_window", _OF_STREAM),
    Meaning(
        "",
        "retention retention_ms retention_period message_retention_period",
        "see set_retention, or pgqueue stream retention",
    ),
    Meaning(
        "",
        "partitions num_partitions partition_count shards replication_factor",
        "omit it: a stream has no partitions, and messages of a key keep their order",
    ),
)
"""The options of other software. A name may have several meanings: the first that an interface has
is meant there."""


def hint(name: str, names: Iterable[str]) -> str:
    """The hint for an unknown name.

    Case and punctuation do not count: maxRetries, max-retries and max_retries are one.

    Args:
        name: the unknown name.
        names: the known names.
    """
    known = {plain(each): each for each in names}
    if near := difflib.get_close_matches(plain(name), known, n=1):
        return f"did you mean {known[near[0]]}?"
    return f"available: {', '.join(known.values()) or 'none'}"


def option_hint(name: str, names: Iterable[str], others: Mapping[str, str] | None = None) -> str:
    """The hint for an unknown option.

    Args:
        name: the unknown option.
        names: the known options.
        others: hints for names that other software uses, in place of those of `MEANINGS`.
    """
    names = [*names]
    foreign = {plain(each): text for each, text in (others or {}).items()}
    return foreign.get(plain(name)) or meant(name, names) or hint(name, names)


def meant(name: str, names: Iterable[str]) -> str | None:
    """The hint for an option of other software; None for a name that is none."""
    known = {plain(each): each for each in names}
    meanings = [each for each in MEANINGS if each.has(name)]
    for each in meanings:
        if ours := [known[word] for word in map(plain, each.ours.split()) if word in known]:
            return f"did you mean {ours[0]}?"
    for each in meanings:
        return each.place.format(each.ours.split()[0] if each.ours else "")
    return None


def plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name[:100].lower())
