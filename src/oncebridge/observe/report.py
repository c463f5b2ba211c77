"""The report of a worker: identity, current state, and counts."""

from msgspec import Struct, field

from oncebridge.observe.counts import Counts


class RouteState(Struct, omit_defaults=True):
    """The current state of one route."""

    sink: str = ""
    """Its address, without secrets."""
    mode: str = "enforce"
    paused: bool = False
    in_flight: int = 0
    owed: int = 0
    """Deliveries that are not recorded in the store yet."""
    down: tuple[str, ...] = ()
    """What was down at the last try: `the sink`, `the store`."""
    down_for_s: float = 0.0
    """Seconds until the next try."""
    balanced: bool = True
    """True if its books balance."""
    rules: tuple[str, ...] = ()
    """The names of its rules, in their order."""
    keys: str = ""
    """A hash of everything that determines keys (`RuleSet.key_fingerprint`)."""


class StoreHealth(Struct, omit_defaults=True):
    """The health of the store, as far as this kind of store reports it."""

    kind: str = ""
    """The scheme of its address."""
    answers: bool = True
    records: int | None = None
    """Number of records, possibly estimated."""
    bytes: int | None = None
    evicted: int | None = None
    """Records that the server evicted; must be 0."""
    clock_offset_ms: int | None = None
    """The store's clock minus this host's."""
    records_lost_ms: int = 0
    """When it lost its records, while that can still lead to duplicates; else 0."""


class State(Struct, omit_defaults=True):
    """The current state of a worker."""

    name: str
    """Unique; letters, digits, dots and dashes only."""
    host: str
    pid: int
    version: str
    started_ms: int
    """By its host's clock, as all times of a worker."""
    at_ms: int
    """The time of the report."""
    ended: bool = False
    """True if it stopped normally."""
    sources: tuple[str, ...] = ()
    """Addresses, without secrets."""
    routes: dict[str, RouteState] = {}
    store: StoreHealth = field(default_factory=StoreHealth)
    spooled: int | None = None
    """Events in the spool, if there is one."""
    not_ready: tuple[str, ...] = ()
    """Reasons why it is not ready."""
    history: int = 0
    """The number of history pages it has begun; see `oncebridge.observe.history`."""


class Report(Struct):
    """State and counts of a worker."""

    state: State
    counts: Counts
