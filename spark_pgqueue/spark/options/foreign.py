"""Options of other connectors, and the option to use here instead."""

FOREIGN = {
    "dsn": "use url: Spark hides its value in explain() and logs",
    "uri": "use url",
    "dbtable": "use stream; or table, when writing",
    **dict.fromkeys(
        ("host", "port", "database", "dbname"),
        "put it into url: postgresql://user@host:5432/dbname",
    ),
    "query": "use stream and table, and option where",
    **dict.fromkeys(("driver", "fetchsize", "batchsize"), "leave it out: JDBC is not used here"),
    "path": "use stream: load, save and start take no path here",
    "numpartitions": "use minPartitions, when reading",
    "maxconnections": "as many tasks write as the DataFrame has partitions: call coalesce() on it "
    "before, to write with fewer",
    "maxfilespertrigger": "use maxMessagesPerTrigger, when reading",
    # of spark.read
    "table": "it is for spark.read, which looks into a queue, and for writing",
    "columns": 'it goes with table, for spark.read: option("table", "pending")',
    "where": 'it goes with table, for spark.read: option("table", "pending")',
    # Kafka's
    "kafka.bootstrap.servers": "use url: the database, postgresql://user@host:5432/dbname",
    **dict.fromkeys(("topic", "topics", "topicname", "queue", "queuename"), "use stream"),
    "bootstrap.servers": "use url: the database, postgresql://user@host:5432/dbname",
    "groupid": "use consumer; or group, without one",
    "failondataloss": "it is for readStream",
    "includeheaders": "leave it out: a column has the headers",
    "subscribe": "use stream for what is read, or streams, and consumer for who claims it",
    "subscribepattern": "use streamPattern, without consumer",
    "assign": "use stream or streams; minPartitions for how many tasks read",
    "streams": "leave consumer out, when reading: a consumer is of one stream",
    "streampattern": "leave consumer out, when reading: a consumer is of one stream",
    "group": "it is for readStream without consumer: with one, Postgres knows how far it is",
    "group.id": "use consumer; or group, without one",
    "kafka.group.id": "use consumer; or group, without one",
    "groupidprefix": "use consumer; or group, without one",
    "startingoffsets": "use startingPosition with createConsumer, when reading: "
    "earliest, latest or a time; or leave consumer out",
    "startingtimestamp": "use startingPosition with createConsumer, when reading, or leave "
    "consumer out",
    "startingoffsetsbytimestamp": "use startingPosition with createConsumer, when reading; or, "
    "without consumer, startingTimestamp, or startingOffsets with a time for each stream",
    "startingoffsetsbytimestampstrategy": "leave it out: there is always a place for a time",
    "endingoffsets": "use trigger(availableNow=True): it reads what is there when it starts",
    "endingtimestamp": "use trigger(availableNow=True): it reads what is there when it starts",
    "endingoffsetsbytimestamp": "use endingTimestamp, or endingOffsets with a time for each "
    "stream, in a batch without consumer",
    "fetchoffset.numretries": "use retryTimeout",
    "fetchoffset.retryintervalms": "leave it out: see retryTimeout",
    "kafkaconsumer.polltimeoutms": "use retryTimeout",
    "maxoffsetspertrigger": "use maxMessagesPerTrigger, when reading",
    "minoffsetspertrigger": "use minMessagesPerTrigger, when reading",
}
KAFKA = "leave it out: what Postgres needs to connect goes into url"
CATALOG = (
    "a table of Spark's catalog keeps no options: in its place, create temporary view ... using "
    "pgqueue options (...)"
)
