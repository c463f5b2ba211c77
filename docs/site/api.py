"""
The API reference reads a setting's `Doc` as its docstring.

Settings carry their text in the annotation, `Annotated[timedelta, Doc("How long …")]`, because the
configuration page and the command line are made of it too. Here the type and the text come apart.
"""  # noqa: INP001 - a file for MkDocs, not part of a package

import ast
from typing import Any

from griffe import Attribute, Docstring, ExprCall, ExprSubscript, ExprTuple, Extension


class SettingsRead(Extension):
    """Shows each setting with its type and its text."""

    def on_attribute_instance(self, *, attr: Attribute, **kwargs: Any) -> None:  # noqa: ARG002
        """Take the annotation of a setting apart."""
        annotation = attr.annotation
        if not isinstance(annotation, ExprSubscript) or str(annotation.left) != "Annotated":
            return
        inner = annotation.slice
        if not isinstance(inner, ExprTuple) or len(inner.elements) != 2:
            return
        kind, doc = inner.elements
        if isinstance(doc, ExprCall) and str(doc.function) == "Doc" and doc.arguments:
            attr.annotation = kind
            attr.docstring = Docstring(ast.literal_eval(str(doc.arguments[0])), parent=attr)
