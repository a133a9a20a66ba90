"""Rewrites a JSON schema of any draft into the part of JSON Schema that the grammar compiler enforces exactly.

`normalize` resolves references, translates the forms of older drafts, and takes out the keywords that are not enforced,
each with a note. The grammar of the result accepts more than the schema does only where a note says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urldefrag, urljoin

from thalweg.text.ecma_regex import UnsupportedPattern, to_rust
from thalweg.text.schema_overlap import Overlaps

Schema = dict[str, Any] | bool
MAX_NODES = 30_000  # subschemas, those behind references once for each place that a reference names
MAX_EXACT = 10**17  # larger numbers are not compiled exactly
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_OBJECT = ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties")
_DATE = (
    r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26]|0[48])00)-02-29"
)
_PCHAR = "(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"
_PCHARS = f"(?:{_PCHAR}|:)"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
# What the compiler's own expression for a format leaves open: days and seconds that do not exist, lengths.
_NARROWED = {
    "date": f"^(?:{_DATE})",
    "date-time": f"^(?:{_DATE}).*:[0-5][0-9]:[0-5][0-9]",
    "time": "^..:..:[0-5]",
    "email": r"^[^@]{1,64}@(?:\[|[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})*$)",
}
_NATIVE = {*_NARROWED, "duration", "hostname", "ipv4", "ipv6", "uuid", "uri"}
_AS_PATTERN = {  # of uri-reference the common part: no user, no literal IPv6 address
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
    "uri-reference": (
        f"^(?:(?:[A-Za-z][A-Za-z0-9+.-]*:)?(?://(?:[A-Za-z0-9._~-]|%[0-9A-Fa-f]{{2}})*(?::[0-9]*)?(?:/{_PCHARS}*)*"
        f"|/(?:{_PCHARS}+(?:/{_PCHARS}*)*)?|{_PCHAR}+(?:/{_PCHARS}*)*)?)"
        f"(?:[?](?:{_PCHARS}|[/?])*)?(?:#(?:{_PCHARS}|[/?])*)?$"
    ),
}
_OPEN_FORMATS = {"idn-email", "idn-hostname", "iri", "iri-reference", "uri-template", "regex"}
# Keywords that are not enforced, and the values with which they allow everything.
_UNENFORCED: Mapping[str, tuple[Any, ...]] = {
    "not": (False,),
    "uniqueItems": (False,),
    "contains": (),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
_UNEVALUATED = {  # keyword → the one that it equals without applicators beside it and without these siblings
    "unevaluatedProperties": ("additionalProperties", set[str]()),
    "unevaluatedItems": ("items", {"contains"}),
}
_IN_PLACE = {
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "if",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
}


class SchemaError(ValueError):
    """What makes a schema unusable. path: JSON pointer of the place in it."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path, self.message = path, message


class NormalSchema(NamedTuple):
    schema: dict[str, Any]  # an object; its references are `#/$defs/…`
    notes: dict[str, str]  # JSON pointer of a keyword that is not, or not fully, enforced → how it is treated
    paths: dict[int, str]  # id of each subschema's object → its pointer in the source


def fragment(path: str) -> str:
    """A JSON pointer as a URI fragment, which has no spaces and no commas."""
    return "#" + quote(path, safe="/~$")


def normalize(schema: Schema) -> NormalSchema:
    """Raises SchemaError."""
    return _Normalizer(schema).run()


def escape(key: str | int) -> str:
    """A step of a JSON pointer."""
    return "/" + str(key).replace("~", "~0").replace("/", "~1")


class _Place(NamedTuple):
    value: Any
    path: str  # JSON pointer from the root
    base: str  # URI that references in it are relative to


class _Normalizer:
    def __init__(self, root: Schema) -> None:
        self.root, self.notes, self.paths = root, {}, {}  # type: tuple[Schema, dict[str, str], dict[int, str]]
        self.resources: dict[str, _Place] = {}  # URI, or URI#anchor → place
        self.names: dict[str, str] = {}  # pointer of a referenced place → its name in $defs
        self.pending: list[tuple[str, _Place]] = []
        self.defs: dict[str, Any] = {}
        self.alternatives: list[tuple[str, list[Any]]] = []  # of each oneOf
        self.nodes = 0
        self.root_base = _id(root, "")
        self.resources[self.root_base] = _Place(root, "", self.root_base)
        self._index(root, "", "")
        self.is_old = isinstance(root, dict) and any(f"draft-0{n}" in str(root.get("$schema")) for n in (3, 4, 6, 7))

    def run(self) -> NormalSchema:
        schema = self._schema(self.root, "", self.root_base)
        while self.pending:
            name, place = self.pending.pop()
            self.defs[name] = self._schema(*place)
        if schema is False:
            raise SchemaError("", "is false, so no value matches")
        if self.defs:
            schema = {**schema, "$defs": self.defs}
            self.paths[id(schema)] = ""
        overlaps = Overlaps(self.defs)
        for path, branches in self.alternatives:
            if overlaps.any_of(branches):
                self.notes[path] = "is enforced as anyOf, because several of its branches may match one value"
        return NormalSchema(schema, self.notes, self.paths)

    def _index(self, value: Any, path: str, base: str) -> None:
        """Finds the places that references can name by URI or anchor."""
        if isinstance(value, dict):
            base = _id(value, base)
            self.resources.setdefault(base, _Place(value, path, base))
            for key in "$anchor", "$dynamicAnchor", "$id", "id":
                name = value.get(key)
                if isinstance(name, str) and (name.startswith("#") or "nchor" in key):  # draft 4 to 7: "$id": "#name"
                    self.resources.setdefault(f"{base}#{name.removeprefix('#')}", _Place(value, path, base))
            for key, member in value.items():
                if key not in ("enum", "const", "default", "examples"):
                    self._index(member, path + escape(key), base)
        elif isinstance(value, list):
            for i, member in enumerate(value):
                self._index(member, path + escape(i), base)

    def _note(self, path: str, text: str = "is not enforced") -> None:
        self.notes.setdefault(path, text)

    def _schema(self, value: Any, path: str, base: str) -> Any:
        """The normal form of a subschema: an object, or false."""
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise SchemaError(path, f"is too large: at most {MAX_NODES} subschemas, with those behind references")
        if value is True or value is False:
            normal: Any = {} if value else False
        elif isinstance(value, dict):
            normal = _Node(self, value, path, _id(value, base)).normal()
        else:
            raise SchemaError(path, "must be a schema, that is an object or a boolean")
        self.paths[id(normal)] = path
        return normal

    def _reference(self, reference: str, path: str, base: str) -> dict[str, Any] | None:
        """A reference to the definition of its target; None for a target in another document."""
        place = self._resolve(reference, path, base)
        if place is None:
            return None
        name = self.names.get(place.path)
        if name is None:
            name = self.names[place.path] = f"d{len(self.names)}"
            self.pending.append((name, place))
        return {"$ref": f"#/$defs/{name}"}

    def _resolve(self, reference: str, path: str, base: str) -> _Place | None:
        """The place that a reference names: relative to its base URI or, as many write it, to the whole schema."""
        is_local = reference.startswith("#")
        try:
            uri, pointer = urldefrag(base + reference if is_local else urljoin(base, reference))
        except ValueError:
            raise SchemaError(path, "is not a URI") from None
        owners = [self.resources.get(uri), self.resources[self.root_base] if is_local else None]
        for owner in filter(None, owners):
            if pointer and not pointer.startswith("/"):
                place = self.resources.get(f"{owner.base}#{pointer}")
            else:
                place = _descend(owner, unquote(pointer))
            if place is not None:
                return place
        if any(owners):
            raise SchemaError(path, f"names {_short(reference)}, which is not in the schema")
        return None


def _descend(place: _Place | None, pointer: str) -> _Place | None:
    for step in pointer.split("/")[1:]:
        place = place and _member(place, step.replace("~1", "/").replace("~0", "~"))
    return place


def _id(value: Any, base: str) -> str:
    """The base URI within a schema."""
    for key in "$id", "id":
        if isinstance(value, dict) and isinstance(name := value.get(key), str) and not name.startswith("#"):
            try:
                return urldefrag(urljoin(base, name) if base else name).url
            except ValueError:
                return base
    return base


def _member(place: _Place, step: str) -> _Place | None:
    value = place.value
    if isinstance(value, dict) and step in value:
        member = value[step]
    elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
        member = value[int(step)]
    else:
        return None
    return _Place(member, place.path + escape(step), _id(member, place.base))


class _Node:
    """One schema object on its way to the normal form."""

    def __init__(self, whole: _Normalizer, source: dict[str, Any], path: str, base: str) -> None:
        self.whole, self.source, self.path, self.base = whole, source, path, base
        self.out: dict[str, Any] = {}
        self.also: list[Any] = []  # schemas that hold beside it
        self.has_all_names = True  # of its patternProperties

    def normal(self) -> Any:
        source = self.source
        has_object = False
        for key in source:
            if key in _OBJECT:
                for member in () if has_object else _OBJECT:  # their order relative to each other matters
                    if member in source:
                        _KEYWORDS[member](self, member, source[member])
                has_object = True
            elif key in _UNENFORCED:
                self._unenforced(key, source[key])
            elif key in _KEYWORDS:
                _KEYWORDS[key](self, key, source[key])
        if self.also:
            self.out["allOf"] = self.out.get("allOf", []) + self.also
        if len(self.out) == 1 and len(self.out.get("allOf", ())) == 1:
            return self.out["allOf"][0]  # what refers to itself may have no siblings
        return self.out

    def note(self, key: str, text: str = "is not enforced") -> None:
        self.whole._note(self.path + escape(key), text)

    def error(self, key: str, message: str) -> SchemaError:
        return SchemaError(self.path + escape(key), message)

    def beside(self, schema: dict[str, Any]) -> None:
        """Adds a schema that holds beside the others."""
        self.whole.paths[id(schema)] = self.path
        self.also.append(schema)

    def sub(self, key: str, value: Any, *steps: str | int) -> Any:
        return self.whole._schema(value, self.path + escape(key) + "".join(map(escape, steps)), self.base)

    def _unenforced(self, key: str, value: Any) -> None:
        if any(value is harmless or value == harmless and value not in (0, 1) for harmless in _UNENFORCED[key]):
            return
        if key in _UNEVALUATED and not _IN_PLACE & self.source.keys():  # only siblings evaluate
            applied, siblings = _UNEVALUATED[key]
            is_tuple = applied == "items" and isinstance(self.source.get(applied), list)  # of older drafts
            if ("additionalItems" if is_tuple else applied) in self.source:
                return
            if not siblings & self.source.keys():
                self.out[applied] = self.sub(key, value)
                return
        self.note(key)

    def types(self, key: str, value: Any) -> None:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names or not all(name in _TYPES for name in names):
            raise self.error(key, f"is {_short(value)}; there is {', '.join(_TYPES)}, or a list of these")
        self.out[key] = value

    def const(self, key: str, value: Any) -> None:
        values = value if key == "enum" else [value]
        if not isinstance(values, list) or not values:
            raise self.error(key, "must be a list that is not empty")
        if all(map(_is_exact, values)):
            self.out[key] = value
        else:
            self.note(key, "is not enforced: it has a number of too many digits or a control character")

    def properties(self, key: str, value: Any) -> None:
        self.out[key] = {name: self.sub(key, member, name) for name, member in self._members(key, value)}

    def pattern_properties(self, key: str, value: Any) -> None:
        members = [(name, self.sub(key, member, name)) for name, member in self._members(key, value)]
        try:
            self.out[key] = {to_rust(name): member for name, member in members}
        except UnsupportedPattern as error:
            self.note(key, f"is not enforced: {error}")
            self.has_all_names = False

    def subschema(self, key: str, value: Any) -> None:
        """additionalProperties."""
        if self.has_all_names or value in (True, {}):
            self.out[key] = self.sub(key, value)
        else:
            self.note(key, "is not enforced, because patternProperties is not")

    def _members(self, key: str, value: Any) -> Iterable[tuple[str, Any]]:
        if not isinstance(value, dict):
            raise self.error(key, "must be an object of schemas")
        return value.items()

    def items(self, key: str, value: Any) -> None:
        if isinstance(value, list):  # the form of older drafts
            self.prefix_items(key, value)
            if "additionalItems" in self.source:
                self.out["items"] = self.sub("additionalItems", self.source["additionalItems"])
        else:
            self.out["items"] = self.sub(key, value)

    def prefix_items(self, key: str, value: Any) -> None:
        self._check_list(key, value)
        self.out["prefixItems"] = [self.sub(key, member, i) for i, member in enumerate(value)]

    def required(self, key: str, value: Any) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.error(key, "must be a list of names")
        self.out[key] = list(dict.fromkeys(value))

    def count(self, key: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise self.error(key, f"must be a number of 0 or more, got {_short(value)}")
        if value > MAX_EXACT:
            if key.startswith("min"):
                raise self.error(key, f"is {value}: too large")
            return
        self.out[key] = int(value)
        if key == "minProperties" and value > max(1, len(self.source.get("required", ()))):
            self.note(key, "counts a key that comes twice as two")

    def bound(self, key: str, value: Any) -> None:
        if value is True or value is False:  # draft 4: a flag of minimum and maximum
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, f"must be a number, got {_short(value)}")
        if abs(value) > MAX_EXACT:
            return self.note(key, "is not enforced, because it has too many digits")
        is_exclusive = self.source.get(f"exclusive{key[0].upper()}{key[1:]}") is True
        name = f"exclusive{key[0].upper()}{key[1:]}" if is_exclusive else key
        rounding = ROUND_CEILING if "inimum" in key else ROUND_FLOOR
        exact = Decimal(repr(value))
        if -exact.as_tuple().exponent > 9 or len(exact.as_tuple().digits) > 15:  # type: ignore[operator]
            exact = exact.quantize(Decimal("1e-6") if abs(value) < 1e8 else Decimal(1), rounding)
        self.out[name] = int(exact) if exact == int(exact) else float(exact)

    def multiple(self, key: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.error(key, f"must be a number above 0, got {_short(value)}")
        exact = Decimal(repr(value)).normalize()
        sign, digits, exponent = exact.as_tuple()
        if int(exponent) < -9 or len(digits) > 9 or value > 10**9:
            return self.note(key, "is not enforced, because it has too many digits")
        self.out[key] = int(value) if value == int(value) else value

    def pattern(self, key: str, value: Any) -> None:
        if not isinstance(value, str):
            raise self.error(key, "must be a text")
        try:
            self.out[key] = to_rust(value)
        except UnsupportedPattern as error:
            self.note(key, f"is not enforced: {error}")

    def format(self, key: str, value: Any) -> None:
        if not isinstance(value, str):
            raise self.error(key, "must be a text")
        if value in _OPEN_FORMATS:
            self.note(key, f"{value} is not enforced")
        if value in _NATIVE:
            self.out[key] = value
        if narrow := _NARROWED.get(value) or _AS_PATTERN.get(value):
            self.beside({"pattern": to_rust(narrow)})
        if value == "hostname":
            self.beside({"maxLength": 253})

    def combined(self, key: str, value: Any) -> None:
        """allOf, anyOf and oneOf."""
        self._check_list(key, value)
        if not value:
            raise self.error(key, "must not be empty")
        branches = [self.sub(key, member, i) for i, member in enumerate(value)]
        if key == "oneOf":
            self.whole.alternatives.append((self.path + escape(key), branches))
            if "anyOf" in self.source:
                return self.beside({"anyOf": branches})
            key = "anyOf"
        if key == "anyOf" and len(branches) == 1:
            self.also += branches
        else:
            self.out[key] = branches

    def reference(self, key: str, value: Any) -> None:
        if not isinstance(value, str):
            raise self.error(key, "must be a text")
        reference = self.whole._reference(value, self.path + escape(key), self.base)
        if reference is None:
            self.note(key, "is not enforced, because it names another document")
        else:
            self.out |= reference

    def condition(self, key: str, value: Any) -> None:
        branches = [self.source[name] for name in ("then", "else") if name in self.source]
        if any(branch not in (True, {}) for branch in branches):
            self.note(key)

    def content(self, key: str, value: Any) -> None:
        if self.whole.is_old:  # before 2019-09 a validator may check it
            self.note(key)

    def _check_list(self, key: str, value: Any) -> None:
        if not isinstance(value, list):
            raise self.error(key, "must be a list of schemas")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


def _is_exact(value: Any) -> bool:
    """Whether each number in it has a form that the compiler reads without rounding, and no string has a control
    character that JSON writes as a number.
    """
    if isinstance(value, str):
        return _CONTROL.search(value) is None
    if isinstance(value, dict | list):
        return all(map(_is_exact, value.values() if isinstance(value, dict) else value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    if isinstance(value, int):
        return abs(value) <= 2**53
    digits = Decimal(repr(value)).as_tuple() if math.isfinite(value) else None
    return digits is not None and abs(value) <= 2**53 and int(digits.exponent) >= -9 and len(digits.digits) <= 15


_KEYWORDS: Mapping[str, Callable[[_Node, str, Any], None]] = {
    "type": _Node.types,
    "const": _Node.const,
    "enum": _Node.const,
    "properties": _Node.properties,
    "patternProperties": _Node.pattern_properties,
    "additionalProperties": _Node.subschema,
    "required": _Node.required,
    **dict.fromkeys(("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"), _Node.count),
    "items": _Node.items,
    "prefixItems": _Node.prefix_items,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _Node.bound),
    "multipleOf": _Node.multiple,
    "pattern": _Node.pattern,
    "format": _Node.format,
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), _Node.combined),
    "$ref": _Node.reference,
    "if": _Node.condition,
    **dict.fromkeys(("contentEncoding", "contentMediaType"), _Node.content),
}
