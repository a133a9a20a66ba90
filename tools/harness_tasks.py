"""The bundled tasks as task files of lm-evaluation-harness: `python -m tools.harness_tasks models/tiny FOLDER`.

Prompts are in the checkpoint's own chat format, thinking included, so they go to `local-completions`, and nothing is
downloaded:

    thalweg eval models/tiny --harness thalweg_sums thalweg_recall thalweg_recall_choice --harness-include FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from thalweg.bench.answering import PromptFormat
from thalweg.bench.eval_files import recall_questions
from thalweg.bench.tasks import make_items

HEAD = """\
task: thalweg_{name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
doc_to_text: "{{{{prompt}}}}"
target_delimiter: ""
"""
WRITTEN = """\
output_type: generate_until
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["<｜end▁of▁sentence｜>"]
  max_gen_toks: {limit}
  do_sample: false
filter_list:
  - name: last
    filter:
      - function: regex
        regex_pattern: "([A-Za-z0-9]+)\\\\W*$"
      - function: take_first
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
"""
CHOSEN = """\
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
"""


def written(name: str, texts: PromptFormat, count: int) -> tuple[list[dict[str, object]], str]:
    """Rows and task text of a task whose answer is the last word or number that is written."""
    items = make_items(name, "held_out", count)
    rows: list[dict[str, object]] = [
        {"prompt": texts.encoder.encode(item.messages, None, thinking=item.thinking), "answer": item.answer}
        for item in items
    ]
    return rows, WRITTEN.format(limit=items[0].max_new_tokens)


def chosen(texts: PromptFormat, count: int) -> tuple[list[dict[str, object]], str]:
    """Rows and task text of the right word among four."""
    return list(_chosen(texts, count)), CHOSEN


def _chosen(texts: PromptFormat, count: int) -> Iterator[dict[str, object]]:
    for question in recall_questions(make_items("recall", "held_out", count)):
        assert not isinstance(question.prompt, str)
        prompt = texts.encoder.encode(question.prompt, None, thinking=False)
        yield {"prompt": prompt, "choices": question.choices, "answer": question.answer}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.harness_tasks", description="Bundled tasks for lm-evaluation-harness."
    )
    parser.add_argument("model", type=Path, help="folder of the checkpoint whose chat format is used")
    parser.add_argument("folder", type=Path, help="where the task files go")
    parser.add_argument("--items", type=int, default=100, metavar="N", help="documents of a task (default: 100)")
    args = parser.parse_args(words)
    args.folder.mkdir(parents=True, exist_ok=True)
    texts = PromptFormat(args.model)
    made = {name: written(name, texts, args.items) for name in ("sums", "recall")}
    made["recall_choice"] = chosen(texts, args.items)
    for name, (rows, text) in made.items():
        data = (args.folder / f"{name}.jsonl").resolve()
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (args.folder / f"{name}.yaml").write_text(HEAD.format(name=name, file=data) + text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
