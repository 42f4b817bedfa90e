"""A tool with a state of its own for verl's agent loop, and a parser that finds calls of it anywhere.

Loaded by ``VERL_USE_EXTERNAL_MODULES``, as the platform is.
"""

import json

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

SCHEMA = {
    "type": "function",
    "function": {
        "name": "climb",
        "description": "Go up.",
        "parameters": {"type": "object", "properties": {"steps": {"type": "integer"}}, "required": ["steps"]},
    },
}
CONFIG = """
tools:
  - class_name: tools.Ladder
    config: {type: native}
"""


class Ladder(BaseTool):
    """An environment: where one stands is kept between the calls of a completion."""

    def __init__(self, config, tool_schema=None):
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))

    async def execute(self, instance_id, parameters, agent_data=None, **_):
        height = agent_data.extra_fields.get("height", 0) + parameters["steps"]
        agent_data.extra_fields["height"] = height
        return ToolResponse(text=f"at {height}"), 0.0, {}


@ToolParser.register("always")
class Always(ToolParser):
    """A model of random weights calls nothing: whatever it writes is taken for a call."""

    async def extract_tool_calls(self, responses_ids, tools=None):
        call = FunctionCall(name="climb", arguments=json.dumps({"steps": len(responses_ids)}))
        return self.tokenizer.decode(responses_ids), [call]
