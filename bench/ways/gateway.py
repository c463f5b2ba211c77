"""Our own gateway, with a store by its address and a sink that does nothing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from traffic import RULE, NullSink

from oncebridge import Gateway, Verdict
from oncebridge.service.addresses import StorePlace
from ways import REGION, Address, Decide


@asynccontextmanager
async def ours(address: Address) -> AsyncIterator[Decide]:
    store = StorePlace.of(url(address), **options(address)).opened
    if hasattr(store, "migrate"):
        await store.migrate()
    gateway = Gateway(store=store, sink=NullSink(), rules=[RULE])

    async def decide(batch: list[bytes]) -> int:
        outcomes = await gateway.process(batch)
        return sum(outcome.verdict is Verdict.DUPLICATE for outcome in outcomes)

    async with gateway:
        yield decide
    verdicts, arrived = gateway.books.verdicts, gateway.books.arrived
    if verdicts[Verdict.DUPLICATE] + verdicts[Verdict.DELIVERED] != arrived:
        raise SystemExit(f"the books say {gateway.books.counts()}")


def url(address: Address) -> str:
    return {
        "memory": "memory:",
        "redis": f"redis://127.0.0.1:{address.port}/0",
        "postgres": f"postgresql://oncebridge@127.0.0.1:{address.port}/{address.name}",
        "dynamodb": f"dynamodb://{address.name}?region={REGION}",
        "s3": f"s3://{address.name}/records?region={REGION}",
    }[address.kind]


def options(address: Address) -> dict[str, str]:
    if not address.port:
        return {}
    # A slow moment of the machine shows as such, and not as a failure.
    patient = {"timeout": "25s", "connect_timeout": "25s"}
    is_aws = address.kind in ("dynamodb", "s3")
    return {**patient, "endpoint": address.endpoint} if is_aws else patient
