"""All parts of the table, in the order in which they are printed."""

import audits
import calls
import cold
import decisions
import keys
import latency
import neighbours
import queues
import scaling
import service
import sizes
import targets
import watch_path
import weights
from table import Measure, Topic

import stores

TOPICS: dict[str, Topic] = {
    topic.name: topic
    for topic in (
        targets.TOPIC,
        keys.TOPIC,
        calls.TOPIC,
        decisions.TOPIC,
        stores.TOPIC,
        scaling.TOPIC,
        sizes.TOPIC,
        weights.TOPIC,
        service.TOPIC,
        latency.TOPIC,
        neighbours.TOPIC,
        queues.TOPIC,
        watch_path.TOPIC,
        cold.TOPIC,
        audits.TOPIC,
    )
}
ROWS: dict[str, Measure] = {
    name: row for topic in TOPICS.values() for name, row in topic.rows.items()
}
