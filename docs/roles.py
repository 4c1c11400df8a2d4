"""Sphinx roles and formulas of the docstrings as Markdown, for the API reference."""

import re
from typing import Any

from griffe import Extension, Object

_DIRECTIVE = re.compile(r"^\.\. math:: (.+(?:\n[ \t]+\S.*)*)", re.MULTILINE)
_FORMULA = re.compile(r":math:`([^`]+)`")
_REFERENCE = re.compile(r":(?:class|func|meth|mod|attr):`~?([^`]+)`")


def to_markdown(text: str) -> str:
    text = _DIRECTIVE.sub(lambda match: f"\\[{' '.join(match[1].split())}\\]", text)
    text = _FORMULA.sub(lambda match: f"\\({' '.join(match[1].split())}\\)", text)
    return _REFERENCE.sub(lambda match: f"`{match[1].rsplit('.', 1)[-1]}`", text).replace("``", "`")


class Roles(Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
