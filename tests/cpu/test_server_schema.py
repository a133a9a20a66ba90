"""schemathesis against the server: bodies, answers and errors match the OpenAPI page."""

from __future__ import annotations

from typing import get_args

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.cpu.fakes import FakeFront, fake_app
from thalweg.engine.client import EngineState

EXAMPLES = 12
schema = schemathesis.openapi.from_asgi("/openapi.json", fake_app(FakeFront(chunk=4096)))


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_answers_match_the_openapi_page(case: schemathesis.Case) -> None:
    case.call_and_validate(
        checks=[
            checks.not_a_server_error,
            content_type_conformance,
            negative_data_rejection,
            response_schema_conformance,
            status_code_conformance,
            unsupported_method,
        ]
    )


def test_limits_are_on_the_page() -> None:
    components = schema.raw_schema["components"]["schemas"]
    temperature = components["ChatRequest"]["properties"]["temperature"]["anyOf"]
    assert {"type": "number", "minimum": 0, "maximum": 100} in temperature
    assert components["ChatRequest"]["properties"]["messages"]["minItems"] == 1
    assert components["MessagesRequest"]["properties"]["max_tokens"] == {
        "type": "integer",
        "minimum": 0,
        "maximum": 2**63 - 1,
    }


def test_fields_of_responses_are_on_the_page() -> None:
    components = schema.raw_schema["components"]["schemas"]
    for name, fields in (
        ("ServerInfoResponse", {"version", "internal_states"}),
        ("InternalState", {"token_usage", "stats"}),
        ("AbortResponse", {"aborted"}),
        ("FlushResponse", {"flushed"}),
        ("ModelCard", {"id", "object", "owned_by"}),
        ("ResponsesResponse", {"output", "status", "metadata"}),
    ):
        assert fields <= set(components[name]["required"]), name
    assert "model" not in components["ChatRequest"].get("required", ())
    assert "prompt_token_ids" not in components["ChatChoice"]["properties"]
    assert set(components["ServerState"]["properties"]["status"]["enum"]) == set(get_args(EngineState))
