"""What a worker tells of itself: what it is, how it is right now, and all that it has counted."""

from msgspec import Struct, field

from oncebridge.observe.counts import Counts


class RouteState(Struct, omit_defaults=True):
    """How one route is right now."""

    sink: str = ""
    """Its address, without what is secret in it."""
    mode: str = "enforce"
    paused: bool = False
    in_flight: int = 0
    owed: int = 0
    """What is delivered, and could not be recorded in the store yet."""
    down: tuple[str, ...] = ()
    """What was down when it was last tried: `the sink`, `the store`."""
    down_for_s: float = 0.0
    """In how many seconds it is tried again."""
    balanced: bool = True
    """Its books balance."""
    rules: tuple[str, ...] = ()
    """The names of its rules, in their order."""
    keys: str = ""
    """A hash of what decides the keys of its events (`RuleSet.key_fingerprint`)."""


class StoreHealth(Struct, omit_defaults=True):
    """How the store is right now, as far as this kind of store can tell."""

    kind: str = ""
    """The scheme of its address."""
    answers: bool = True
    records: int | None = None
    """How many records there are, or about how many."""
    bytes: int | None = None
    evicted: int | None = None
    """Records that the server threw out for want of room; any is one too many."""
    clock_offset_ms: int | None = None
    """The store's clock less this host's."""
    records_lost_ms: int = 0
    """When it lost its records, by its clock, while that can still lead to repeats; else 0."""


class State(Struct, omit_defaults=True):
    """How a worker is right now."""

    name: str
    """Nobody else's; letters, digits, dots and dashes only."""
    host: str
    pid: int
    version: str
    started_ms: int
    """By its host's clock, as all times of a worker."""
    at_ms: int
    """When it told this."""
    ended: bool = False
    """It went in good order."""
    sources: tuple[str, ...] = ()
    """Addresses, without what is secret in them."""
    routes: dict[str, RouteState] = {}
    store: StoreHealth = field(default_factory=StoreHealth)
    spooled: int | None = None
    """How many arrivals wait on disk, where there is a spool."""
    not_ready: tuple[str, ...] = ()
    """What keeps events from passing."""
    history: int = 0
    """How many pages of history it has begun; see `oncebridge.observe.history`."""


class Report(Struct):
    """All that a worker tells."""

    state: State
    counts: Counts
