"""A set-up on an emulator that is in order, to be spoilt by a test, and checked."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any, Self

import boto3
from tests.check.commands import check_command
from tests.servers.aws import fresh
from tests.servers.guarded_aws import ACCOUNT, GuardedAws

from oncebridge.check.aws import check_aws
from oncebridge.check.finding import Checkup, Finding
from oncebridge.service.config import load

ORGANISATION = "0f1e2d3c-0000-4000-8000-00000000abcd"
TWO_WEEKS = "1209600"


@cache
def client(endpoint: str, service: str) -> Any:
    return boto3.client(
        service,
        region_name="us-east-1",
        endpoint_url=endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )


class AwsAccount:
    """
    A bus, a rule, a queue with a dead-letter queue, a table and dead letters.

    All as `oncebridge template worker` makes them; names are nobody else's.
    """

    def __init__(self, aws: GuardedAws, *, fifo: bool = False) -> None:
        self.endpoint = aws.endpoint
        self.name = fresh("check")
        self.end = ".fifo" if fifo else ""
        self.bus = self.name
        self.events = client(self.endpoint, "events")
        self.sqs = client(self.endpoint, "sqs")
        self.dynamodb = client(self.endpoint, "dynamodb")
        self.settings: dict[str, str] = {}
        self._buses: list[str] = []
        self.mappings: list[str] = []
        self.add_bus(self.bus)
        self.undelivered = self.queue("undelivered")
        self.failed = self.queue(f"failed{self.end}")
        self.dead = self.queue("dead")
        redrive = {"deadLetterTargetArn": self.arn(self.failed), "maxReceiveCount": "100"}
        self.source = self.queue(
            f"in{self.end}",
            MessageRetentionPeriod="345600",
            VisibilityTimeout="120",
            RedrivePolicy=json.dumps(redrive),
        )
        self.rule = self.add_rule("rule")
        for url in (self.undelivered, self.source):
            self.allow(url, self.rule)
        self.table = self.add_table()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Take away what others would meet: buses are looked at, and mappings read."""
        for uuid in self.mappings:
            client(self.endpoint, "lambda").delete_event_source_mapping(UUID=uuid)
        for bus in self._buses:
            for rule in self.events.list_rules(EventBusName=bus)["Rules"]:
                named = {"EventBusName": bus, "Rule": rule["Name"]}
                ids = [one["Id"] for one in self.events.list_targets_by_rule(**named)["Targets"]]
                if ids:
                    self.events.remove_targets(**named, Ids=ids)
                self.events.delete_rule(EventBusName=bus, Name=rule["Name"])
            self.events.delete_event_bus(Name=bus)

    # --- making --------------------------------------------------------------------------

    def queue(self, name: str, **attributes: str) -> str:
        given = {"MessageRetentionPeriod": TWO_WEEKS, **attributes}
        if name.endswith(".fifo"):
            given |= {"FifoQueue": "true", "ContentBasedDeduplication": "true"}
        return self.sqs.create_queue(QueueName=f"{self.name}-{name}", Attributes=given)["QueueUrl"]

    def add_bus(self, name: str) -> str:
        self._buses.append(name)
        return self.events.create_event_bus(Name=name)["EventBusArn"]

    def set(self, url: str, **attributes: str) -> None:
        self.sqs.set_queue_attributes(QueueUrl=url, Attributes=attributes)

    def allow(self, url: str, *rules: str) -> None:
        """Let rules of EventBridge send to a queue."""
        statement = {
            "Effect": "Allow",
            "Principal": {"Service": "events.amazonaws.com"},
            "Action": "sqs:SendMessage",
            "Resource": self.arn(url),
            "Condition": {"ArnEquals": {"aws:SourceArn": list(rules)}},
        }
        self.set(url, Policy=json.dumps({"Version": "2012-10-17", "Statement": [statement]}))

    def add_rule(
        self,
        name: str,
        *,
        bus: str | None = None,
        pattern: dict[str, Any] | None = None,
        targets: Sequence[dict[str, Any]] = ({},),
        to: str | None = None,
    ) -> str:
        """Make a rule that leads to the queue, or *to* something else; give its ARN."""
        bus = bus or self.bus
        pattern = pattern or {"source": ["com.example.orders"]}
        arn = self.events.put_rule(
            Name=f"{self.name}-{name}", EventBusName=bus, EventPattern=json.dumps(pattern)
        )["RuleArn"]
        self.events.put_targets(
            Rule=f"{self.name}-{name}",
            EventBusName=bus,
            Targets=[
                self.target(**{"Id": f"oncebridge-{at}", "Arn": to or self.arn(self.source), **one})
                for at, one in enumerate(targets)
            ],
        )
        return arn

    def target(self, **given: Any) -> dict[str, Any]:
        usual: dict[str, Any] = {
            "RetryPolicy": {"MaximumEventAgeInSeconds": 86400, "MaximumRetryAttempts": 185},
            "DeadLetterConfig": {"Arn": self.arn(self.undelivered)},
        }
        if self.end:
            usual["SqsParameters"] = {"MessageGroupId": "all"}
        found = usual | given
        return {name: value for name, value in found.items() if value is not None}

    def retarget(self, **changes: Any) -> None:
        """Change the target of the first rule; None takes something away."""
        self.add_rule("rule", targets=[changes])

    def add_table(self, **changes: Any) -> str:
        name = fresh(self.name)
        given: dict[str, Any] = {
            "TableName": name,
            "AttributeDefinitions": [{"AttributeName": "k", "AttributeType": "B"}],
            "KeySchema": [{"AttributeName": "k", "KeyType": "HASH"}],
            "BillingMode": "PAY_PER_REQUEST",
            "DeletionProtectionEnabled": True,
        }
        self.dynamodb.create_table(**(given | changes))
        expiry = {"Enabled": True, "AttributeName": "x"}
        self.dynamodb.update_time_to_live(TableName=name, TimeToLiveSpecification=expiry)
        return name

    def arn(self, url: str) -> str:
        return f"arn:aws:sqs:us-east-1:{ACCOUNT}:{url.rpartition('/')[2]}"

    # --- checking ------------------------------------------------------------------------

    def flags(self) -> dict[str, str]:
        return {
            "source": f"sqs://{self.source.rpartition('/')[2]}",
            "store": f"dynamodb://{self.table}",
            "dead": f"sqs://{self.dead.rpartition('/')[2]}",
            "sink": "https://crm.example.com/hooks",
            **self.settings,
        }

    async def check(self, **asked: Any) -> Checkup:
        """Check a worker of this account."""
        checkup = Checkup()
        await check_aws(load(flags=self.flags(), environment={}), checkup, **asked)
        for finding in checkup.findings:
            for line in finding.fix.splitlines():
                if line.startswith("aws "):
                    check_command(line)
        return checkup

    def follow(self, finding: Finding, **instead: str) -> list[str]:
        """Run the commands of a fix, with words put in place of others; name what was run."""
        lines = [line for line in finding.fix.splitlines() if line.startswith("aws ")]
        for line in lines:
            for name, word in instead.items():
                line = line.replace(name, word)  # noqa: PLW2901
            called = check_command(line)
            assert called is not None, line
            service, method, arguments = called
            getattr(client(self.endpoint, service), method)(**arguments)
        return [" ".join(line.split()[1:3]) for line in lines]


def codes(checkup: Checkup) -> list[str]:
    """Name what was found; whatever else came of it must be nothing."""
    assert not checkup.not_checked, checkup.not_checked
    return sorted({finding.code for finding in checkup.findings})


class Function:
    """A function that runs oncebridge; it may do everything."""

    def __init__(self, account: AwsAccount, name: str = "function", timeout_s: int = 20) -> None:
        self.account = account
        self.lambda_ = client(account.endpoint, "lambda")
        self.name = f"{account.name}-{name}"
        self.arn = self.lambda_.create_function(
            FunctionName=self.name,
            Runtime="python3.13",
            Handler="oncebridge.aws.function.handler",
            Role=role(
                account.endpoint, self.name, {"Effect": "Allow", "Action": "*", "Resource": "*"}
            ),
            Timeout=timeout_s,
            Code={"ZipFile": b"PK\5\6" + bytes(18)},
        )["FunctionArn"]

    def reads(self, arn: str, **given: Any) -> None:
        """Have Lambda read a queue or stream for it."""
        usual = {"FunctionResponseTypes": ["ReportBatchItemFailures"]}
        made = self.lambda_.create_event_source_mapping(
            FunctionName=self.name, EventSourceArn=arn, **(usual | given)
        )
        self.account.mappings.append(made["UUID"])


def role(endpoint: str, name: str, *statements: dict[str, Any], path: str = "/") -> str:
    """Make a role that may do this; give its ARN."""
    iam = client(endpoint, "iam")
    trust = {"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": "sts:AssumeRole"}
    arn = iam.create_role(
        RoleName=name,
        Path=path,
        AssumeRolePolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [trust]}),
    )["Role"]["Arn"]
    document = {"Version": "2012-10-17", "Statement": list(statements)}
    iam.put_role_policy(RoleName=name, PolicyName="it", PolicyDocument=json.dumps(document))
    return arn


def destination(account: AwsAccount, method: str = "POST") -> str:
    """Make an API destination that a rule of the account leads to."""
    connection = account.events.create_connection(
        Name=account.name,
        AuthorizationType="API_KEY",
        AuthParameters={"ApiKeyAuthParameters": {"ApiKeyName": "key", "ApiKeyValue": "invented"}},
    )["ConnectionArn"]
    arn = account.events.create_api_destination(
        Name=account.name,
        ConnectionArn=connection,
        InvocationEndpoint="https://bridge.example.com/events",
        HttpMethod=method,
    )["ApiDestinationArn"]
    rule = account.add_rule(
        "api", to=arn, targets=[{"RoleArn": f"arn:aws:iam::{ACCOUNT}:role/api"}]
    )
    account.allow(account.undelivered, account.rule, rule)
    return account.name
