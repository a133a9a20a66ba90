"""Keys, quotas and admin routes as SECURITY.md promises them: against a real server, or without one where time matters."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.cpu import test_server_safety
from tests.cpu.fakes import FakeFront, eventually, fake_app, serving
from tests.cpu.test_server_safety import ALICE, BOB, CAROL, FREE, KEYS, LONG, ROOT, SHORT, Target, error
from thalweg.config.server import ServerOptions
from thalweg.core.errors import UnsupportedConfig
from thalweg.server.admin import PREFIXES
from thalweg.server.api_keys import MINUTE, ApiKey, ApiKeyEntry, ApiKeys, RequestQuota, ServerLoad
from thalweg.server.errors import ApiError

server, unharmed = test_server_safety.server, test_server_safety.unharmed  # fixtures


def test_a_key_is_needed_and_any_of_its_forms_is_taken(server: Target) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer sk-fre"},
        {"Authorization": FREE},
        {"x-api-key": ""},
        {"Authorization": "Bearer"},
    ):
        answer = httpx.post(server.url + "/v1/completions", json=SHORT, headers=headers)
        assert answer.status_code == 401 and error(answer)["code"] == "invalid_api_key", headers
    for key in (FREE, ALICE, BOB, CAROL, ROOT):
        assert httpx.get(server.url + "/v1/models", headers={"x-api-key": key}).status_code == 200


def test_admin_routes_need_the_admin_key(server: Target) -> None:
    assert server.post("/flush_cache", b"", FREE).status_code == 403
    assert server.post("/flush_cache", b"", "wrong").status_code == 401
    assert server.post("/flush_cache", b"", ROOT).json() == {"flushed": True}
    answer = server.post("/abort", {"abort_all": True}, ALICE)
    assert answer.status_code == 403 and error(answer)["param"] == "abort_all"
    with server.streaming() as lines:
        assert server.post("/abort", {"abort_all": True}, ROOT).json() == {"aborted": 1}
        assert any('"abort"' in line for line in lines)
    with serving(fake_app(FakeFront())) as url:
        answer = httpx.post(url + "/flush_cache")
        assert answer.status_code == 403 and "--admin-api-key" in error(answer)["message"], (
            "off by default, and says so"
        )


def test_a_key_cannot_abort_or_read_what_belongs_to_another(server: Target) -> None:
    body = {**LONG, "rid": "mine"}
    with server.streaming(body, ALICE) as lines:
        for rid in ("mine", "cmpl-mine", "chatcmpl-", "mine@alice"):
            assert server.post("/abort", {"rid": rid}, CAROL).json() == {"aborted": 0}, rid
        next(lines)
        assert server.post("/abort", {"rid": "cmpl-mine"}, ALICE).json() == {"aborted": 1}
    kept = server.post("/v1/responses", {"input": "Good morrow", "max_output_tokens": 2}, ALICE).json()["id"]
    assert server.get(f"/v1/responses/{kept}", CAROL).status_code == 404
    assert server.post("/v1/responses", {"input": "x", "previous_response_id": kept}, CAROL).status_code == 404
    assert server.get(f"/v1/responses/{kept}", ALICE).status_code == 200


def test_a_request_id_must_match_exactly_to_abort() -> None:
    """What is left of it without the prefix once meant all requests."""
    front = FakeFront(lambda prompt, choice: "word " * 400, gap=0.02)
    with serving(fake_app(front)) as url, httpx.stream("POST", url + "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()  # kept: when its iterator goes, so does the connection
        next(lines)
        for prefix in PREFIXES:
            assert httpx.post(url + "/abort", json={"rid": prefix}).json() == {"aborted": 0}
        assert front.running == 1


def test_a_private_cache_is_found_by_its_own_key_only(server: Target) -> None:
    def cached(key: str) -> int:
        body = {
            "text": "A secret that is long enough to fill a page of the cache. " * 8,
            "sampling_params": {"max_new_tokens": 1},
        }
        found: int = server.post("/generate", body, key).json()["meta_info"]["cached_tokens"]
        return found

    assert [cached(key) for key in (CAROL, ALICE, FREE, CAROL)][:2] == [0, 0]
    assert cached(CAROL) > 0 and cached(ALICE) > 0


def test_requests_of_a_key_at_a_time(server: Target) -> None:
    with server.streaming(key=ALICE), server.streaming(key=ALICE):
        answer = server.post("/v1/completions", SHORT, ALICE)
        assert answer.status_code == 429 and error(answer)["param"] == "max_concurrency"
        assert int(answer.headers["Retry-After"]) >= 1
        assert server.post("/v1/completions", SHORT, CAROL).status_code == 200
    eventually(lambda: server.post("/v1/completions", SHORT, ALICE).status_code == 200)


def test_tokens_of_a_key_in_a_minute(server: Target) -> None:
    body = {"prompt": [5] * 50, "max_tokens": 100, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.post("/v1/completions", body, BOB), range(8)))
    good = [answer for answer in answers if answer.status_code == 200]
    assert len(good) == 2, "each of a burst is charged before it runs"
    bad = next(answer for answer in answers if answer.status_code != 200)
    assert bad.status_code == 429 and error(bad)["param"] == "tokens_per_minute"
    assert 1 <= int(bad.headers["Retry-After"]) <= 61
    answer = server.post("/v1/completions", body | {"max_tokens": 351}, BOB)
    assert answer.status_code == 400 and error(answer)["param"] == "max_tokens", "what never fits is told so"
    early = server.post(
        "/v1/completions", {"prompt": [5] * 10, "max_tokens": 80, "stop_token_ids": list(range(16))}, BOB
    )
    assert early.status_code == 200
    left = 400 - sum(one.json()["usage"]["total_tokens"] for one in (*good, early))
    assert server.post("/v1/completions", {"prompt": [5], "max_tokens": left}, BOB).status_code == 429
    assert server.post("/v1/completions", {"prompt": [5], "max_tokens": left - 1}, BOB).status_code == 200, (
        "settled as used"
    )


def test_no_minute_has_more_than_its_tokens() -> None:
    """Random requests on a clock that is turned by hand; usage at most what was charged."""
    import random

    for seed in range(20):
        rng = random.Random(seed)
        tenant, now, admitted, running = ApiKey(ApiKeyEntry(name="t", key="k", tokens_per_minute=1000)), 0.0, [], []
        for _ in range(400):
            now += rng.choice((0.0, 0.1, 3.0, 30.0))
            if running and rng.random() < 0.5:
                quota, entry = running.pop(rng.randrange(len(running)))
                entry[1] = quota.used = rng.randint(0, entry[1])
                quota.close()
            else:
                tokens, quota = rng.randint(1, 600), RequestQuota(tenant, ServerLoad(ServerOptions()))
                try:
                    quota.reserve(tokens, now)
                except ApiError as refused:
                    assert refused.status == 429 and 1 <= refused.retry_after <= MINUTE + 1
                    continue
                entry = [now, tokens]
                admitted.append(entry)
                running.append((quota, entry))
            assert sum(used for at, used in admitted if at > now - MINUTE) <= 1000
        assert sum(used for _, used in admitted) > 5000, "and what is not used can be had"


def test_the_keys_file_is_read_again_and_a_broken_one_changes_nothing(server: Target) -> None:
    try:
        server.keys.write_text(json.dumps([*KEYS[:2], {"name": "dave", "key": "sk-dave"}]))
        eventually(lambda: server.get("/v1/models", "sk-dave").status_code == 200)
        assert server.get("/v1/models", CAROL).status_code == 401
        for broken in ("- name: [", "- name: 2020-13-45", "- name: " + "9" * 5000):
            server.keys.write_text(broken)
            time.sleep(1.3)
            assert server.get("/v1/models", "sk-dave").status_code == 200
    finally:
        server.keys.write_text(json.dumps(KEYS))
    eventually(lambda: server.get("/v1/models", CAROL).status_code == 200)


def test_a_keys_file_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    for text, why in (
        ("- {name: a}", "either key or sha256"),
        (f"- {{name: a, key: b, sha256: {'a' * 64}}}", "either key or sha256"),
        ("- {name: a, sha256: abc}", "key 'a': sha256 must be 64 hexadecimal digits"),
        ("- {name: a, key: b, max_concurency: 1}", "max_concurency"),
        ("- {name: a, key: b, tokens_per_minute: 0}", "tokens_per_minute must be at least 1, got 0; leave it out"),
        ("- {name: a, key: ä}", "ASCII"),
        ("- {name: 'a b', key: b}", "a name has 1 to 64 letters"),
        ("- {name: a, key: b}\n- {name: a, key: c}", "two keys"),
        ("- {name: a, key: b}\n- {name: c, key: b}", "another"),
        ("a: b", "array"),
        ("- 2020-13-45", "month"),
    ):
        path.write_text(text)
        with pytest.raises(UnsupportedConfig, match=why):
            ApiKeys(ServerOptions(api_keys_file=str(path)))
    with pytest.raises(UnsupportedConfig, match="No such file"):
        ApiKeys(ServerOptions(api_keys_file=str(tmp_path / "none")))
