"""A Kafka broker in memory: the mock cluster that librdkafka carries for its own tests, in a process of its own.

It speaks Kafka's protocol for producers, consumers and groups, and costs less than a real broker. It keeps at most
5 MiB of a partition, creates no topics on request, and knows no topic configurations.
"""

import ctypes
import sys
import time
from pathlib import Path

import confluent_kafka

PARTITION_BYTES = 5 << 20


def librdkafka() -> ctypes.CDLL:
    """The library that confluent-kafka's wheel brings along."""
    found = sorted((Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs").glob("librdkafka*"))
    assert found, "confluent-kafka was not installed from a wheel"
    return ctypes.CDLL(str(found[0]))


def start(topics: list[str], partitions: int) -> str:
    """Start a cluster of one broker with these topics, for as long as this process lives; returns its address."""
    library = librdkafka()
    for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
        getattr(library, name).restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    producer = 0
    handle = library.rd_kafka_new(producer, ctypes.c_void_p(library.rd_kafka_conf_new()), None, 0)
    cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(ctypes.c_void_p(handle), 1))
    for topic in topics:
        failed = library.rd_kafka_mock_topic_create(cluster, topic.encode(), partitions, 1)
        assert not failed, f"topic {topic} was not created"
    address: bytes = library.rd_kafka_mock_cluster_bootstraps(cluster)
    return address.decode()


if __name__ == "__main__":
    print(start(sys.argv[2:], int(sys.argv[1])), flush=True)
    while True:
        time.sleep(60)
