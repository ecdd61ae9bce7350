"""Names that other connectors have for what is another option, or no option, here."""

FOREIGN = {
    "dsn": "use url: Spark hides its value in explain() and logs",
    "uri": "use url",
    "dbtable": "use stream",
    "path": "use stream: load, save and start take no path here",
    "user": "put the user into url, or set PGUSER",
    "password": "put the password into url (Spark hides it), or use ~/.pgpass or PGPASSWORD",
    "numpartitions": "use minPartitions, when reading",
    "maxfilespertrigger": "use maxMessagesPerTrigger, when reading",
    # Kafka's
    "kafka.bootstrap.servers": "use url: the database, postgresql://user@host:5432/dbname",
    "topic": "use stream",
    "subscribe": "use stream for what is read, and consumer for who reads it",
    "subscribepattern": "use stream: a query reads one, and a union of queries reads several",
    "assign": "use stream, and consumer for who reads it",
    "kafka.group.id": "use consumer",
    "groupidprefix": "use consumer",
    "startingoffsets": "use startingPosition with createConsumer, when reading: "
    "earliest, latest or a time",
    "startingtimestamp": "use startingPosition with createConsumer, when reading",
    "startingoffsetsbytimestamp": "use startingPosition with createConsumer, when reading",
    "endingoffsets": "use trigger(availableNow=True): it reads what is there when it starts",
    "endingtimestamp": "use trigger(availableNow=True): it reads what is there when it starts",
    "maxoffsetspertrigger": "use maxMessagesPerTrigger, when reading",
    "minoffsetspertrigger": "use minMessagesPerTrigger, when reading",
}
KAFKA = "leave it out: what Postgres needs to connect goes into url"
