"""`docs/configuration.md`, made from the settings: `python -m tools.configuration_page > docs/configuration.md` (`make
docs`).
"""

from __future__ import annotations

from thalweg.config.args import TITLES
from thalweg.config.foreign import NO_EFFECT_FLAGS
from thalweg.config.setting import Setting
from thalweg.config.tree import sections, settings

HEAD = """\
# Configuration

*Generated from the options by `make docs`.*

The command line, YAML and Python set the same options, with the same names, checks and errors. The resolver decides
what you leave open and says why: `thalweg plan MODEL` prints every decision. It never changes what you set: if an
option cannot be honoured, Thalweg stops and names an alternative.

On the command line, with the names of SGLang (underscores work too; boolean flags have a `--no-` form):

```sh
thalweg serve models/tiny --max-running-requests 32 --mem-fraction-static 0.5 --disable-radix-cache
```

In YAML, flat or in sections, with `--config serve.yaml`; flags on the command line win:

```yaml
model: models/tiny
max-running-requests: 32
memory:
  mem_fraction_static: 0.5
  radix_cache: false
```

In Python, by name or as dataclasses:

```python
from thalweg import LLM

llm = LLM("models/tiny", max_running_requests=32, mem_fraction_static=0.5, radix_cache=False)
```

```python
from thalweg.config.options import Options, MemoryOptions, ModelOptions
from thalweg.launch.resolve import resolve

resolved = resolve(Options(model=ModelOptions(model="models/tiny"), memory=MemoryOptions(radix_cache=False)))
```
"""


def document() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, kind in sections().items():
        parts.append(f"\n## {TITLES[name]} (`{name}`)\n\n{' '.join((kind.__doc__ or '').split())}\n")
        parts.append("\n| flag | default | what it does |\n| --- | --- | --- |\n")
        parts += [_row(one) for one in settings().values() if one.section == name]
    parts.append(_other_spellings())
    parts.append(_habits())
    return "".join(parts)


def _row(one: Setting) -> str:
    aliases = [f"--{name}" for name, value, is_foreign in one.spellings() if value is ... and not is_foreign]
    names = ", ".join(f"`{flag}`" for flag in (one.flag, *aliases))
    meanings = "".join(f"<br>`{name}`: {meaning}" for name, meaning in one.meanings.items())
    choices = "" if meanings or not one.choices else f" ({', '.join(f'`{choice}`' for choice in one.choices)})"
    text = one.help + choices + meanings
    return f"| {names} | {one.shown_default} | {text} |\n"


def _other_spellings() -> str:
    rows = []
    for one in settings().values():
        for name, value, is_foreign in one.spellings():
            if value is not ... or is_foreign:
                rows.append(f"| `--{name}` | `{one.called(value)}` |{' yes' if is_foreign else ''} |\n")
    head = (
        "\n## Other spellings\n\nUnderstood too; those of other engines with a line that says what the flag is called"
        " here.\n\n"
    )
    return head + "| flag | means | with a notice |\n| --- | --- | --- |\n" + "".join(rows)


def _habits() -> str:
    rows = [f"| `--{flag}` | {reason} |\n" for flag, reason in NO_EFFECT_FLAGS.items()]
    return "\n## Flags that change nothing\n\n| flag | because |\n| --- | --- |\n" + "".join(rows)


if __name__ == "__main__":
    print(document(), end="")
