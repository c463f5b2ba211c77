"""Read a CloudFormation template, and work it out for given parameters as CloudFormation would."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml

_PSEUDO = {
    "AWS::AccountId": "111122223333",
    "AWS::NoValue": None,
    "AWS::Partition": "aws",
    "AWS::Region": "eu-west-1",
    "AWS::StackName": "stack",
}


class _Loader(yaml.SafeLoader):
    """YAML with the short forms of functions."""


def _function(loader: _Loader, suffix: str, node: yaml.Node) -> dict:
    if isinstance(node, yaml.ScalarNode):
        value: Any = loader.construct_scalar(node)
        if suffix == "GetAtt":
            value = value.split(".")
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        value = loader.construct_mapping(node, deep=True)
    return {suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}": value}


_Loader.add_multi_constructor("!", _function)


@cache
def read(text: str) -> dict:
    return yaml.load(text, _Loader)


class Stack:
    """A template with its parameters filled in."""

    def __init__(self, text: str, **parameters: Any) -> None:
        self.template = read(text)
        declared = self.template["Parameters"]
        assert set(parameters) <= set(declared), set(parameters) - set(declared)
        self.parameters = {
            name: _value(parameters.get(name, told.get("Default")), told["Type"])
            for name, told in declared.items()
        }
        self.resources = {
            name: self.worked_out(resource["Properties"])
            for name, resource in self.template["Resources"].items()
            if self._is_meant(resource)
        }
        self.outputs = {
            name: self.worked_out(output["Value"])
            for name, output in self.template["Outputs"].items()
            if self._is_meant(output)
        }

    def objections(self) -> list[str]:
        """List what the rules of the template say against its parameters."""
        return [
            one["AssertDescription"]
            for rule in self.template["Rules"].values()
            if self._holds(rule.get("RuleCondition", {"Fn::Equals": [1, 1]}))
            for one in rule["Assertions"]
            if not self._holds(one["Assert"])
        ]

    def worked_out(self, value: Any) -> Any:
        if isinstance(value, list):
            found = [self.worked_out(item) for item in value]
            return [item for item in found if item is not None]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            ((name, inner),) = value.items()
            if name == "Ref":
                return self._ref(inner)
            if name.startswith("Fn::"):
                return getattr(self, f"_{name[4:].lower()}")(inner)
        found = {name: self.worked_out(item) for name, item in value.items()}
        return {name: item for name, item in found.items() if item is not None}

    def _is_meant(self, thing: Mapping[str, Any]) -> bool:
        return "Condition" not in thing or self._condition(thing["Condition"])

    def _condition(self, name: str) -> bool:
        return self._holds(self.template["Conditions"][name])

    def _holds(self, test: Mapping[str, Any]) -> bool:
        ((name, inner),) = test.items()
        match name:
            case "Fn::Equals":
                left, right = map(self.worked_out, inner)
                return str(left) == str(right)
            case "Fn::Not":
                return not self._holds(inner[0])
            case "Fn::And":
                return all(map(self._holds, inner))
            case "Fn::Or":
                return any(map(self._holds, inner))
        raise AssertionError(name)

    def _ref(self, name: str) -> Any:
        if name in _PSEUDO:
            return _PSEUDO[name]
        return self.parameters.get(name, f"<{name}>")

    def _getatt(self, path: list[str]) -> str:
        return f"<{'.'.join(path)}>"

    def _if(self, parts: list) -> Any:
        test, yes, no = parts
        return self.worked_out(yes if self._condition(test) else no)

    def _sub(self, given: Any) -> str:
        text, names = given if isinstance(given, list) else (given, {})
        known = {name: self.worked_out(value) for name, value in names.items()}
        return re.sub(
            r"\$\{([^}]+)\}",
            lambda found: str(known[found[1]] if found[1] in known else self._ref(found[1])),
            text,
        )

    def _select(self, parts: list) -> Any:
        at, items = parts
        return self.worked_out(items)[int(at)]

    def _split(self, parts: list) -> list[str]:
        by, text = parts
        return self.worked_out(text).split(by)

    def _findinmap(self, parts: list) -> Any:
        name, first, second = map(self.worked_out, parts)
        return self.template["Mappings"][name].get(str(first), {}).get(second)


def _value(value: Any, kind: str) -> Any:
    if kind == "CommaDelimitedList":
        return [part.strip() for part in str(value).split(",")]
    return value


def with_defaults(text: str, parameters: Mapping[str, Any]) -> str:
    """Write *parameters* into the template as its defaults, for a tool that looks at those."""
    for name, value in parameters.items():
        text, count = re.subn(
            rf"(\n  {name}:\n    Type: \w+\n(?:    Default: .*\n)?)",
            lambda found, value=value: (
                re.sub(r"    Default: .*\n", "", found[1]) + f'    Default: "{value}"\n'
            ),
            text,
        )
        assert count == 1, name
    return text
