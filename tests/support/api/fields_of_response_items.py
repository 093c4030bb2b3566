"""Requests with each item and content type of the Responses API, and the outcome of each."""

from __future__ import annotations

from typing import Any

from support.api.fields import done, ignored, refused

from chairlift.api.responses.compaction import sealed

USER = {"role": "user", "content": "Hi"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


def _items(*items: dict[str, Any]) -> dict[str, Any]:
    return {"input": [USER, *items]}


ITEM_FIELDS = [
    # Parts of a message's content.
    done("content: input_text", _items({"role": "user", "content": "More"})),
    done(
        "content: output_text",
        _items({"role": "assistant", "content": [{"type": "output_text", "text": "Yes"}]}),
    ),
    done(
        "content: refusal",
        _items({"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}),
    ),
    *(
        refused(f"content: {kind}", kind, _items({"role": "user", "content": [{"type": kind}]}))
        for kind in ("input_file", "input_audio")
    ),
    refused("content: input_image", "input_image", _items({"role": "user", "content": [IMAGE]})),
    # Input items by their types.
    done("input: message", _items({"type": "message", "role": "developer", "content": "More"})),
    done(
        "input: function_call",
        _items(
            {
                "type": "function_call",
                "call_id": "c",
                "name": "f",
                "arguments": "{}",
                "namespace": "n",
                "caller": {"type": "direct"},
            }
        ),
    ),
    done(
        "input: function_call_output",
        _items(
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [
                    {"type": "input_text", "text": "sunny "},
                    {"type": "input_text", "text": "and warm"},
                ],
            }
        ),
    ),
    refused(
        "input: function_call_output",
        "input_image",
        _items({"type": "function_call_output", "call_id": "c", "output": [IMAGE]}),
    ),
    done(
        "input: reasoning",
        _items(
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "Hm"}],
                "encrypted_content": "x",
            }
        ),
    ),
    done(
        "input: compaction",
        _items({"type": "compaction", "encrypted_content": sealed("It went well")}),
    ),
    refused(
        "input: compaction",
        "input[1].encrypted_content",
        _items({"type": "compaction", "encrypted_content": "gAAAA"}),
    ),
    done(
        "input: custom_tool_call",
        _items({"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "*** Begin"}),
    ),
    done(
        "input: custom_tool_call_output",
        _items({"type": "custom_tool_call_output", "call_id": "c", "output": "patched"}),
    ),
    done(
        "input: mcp_call",
        _items(
            {
                "type": "mcp_call",
                "id": "mcp_1",
                "name": "look",
                "server_label": "m",
                "arguments": "{}",
                "output": "seen",
            }
        ),
    ),
    ignored(
        "input: mcp_list_tools",
        _items({"type": "mcp_list_tools", "id": "l", "server_label": "m", "tools": []}),
        input=[USER],
    ),
    done(
        "input: local_shell_call",
        _items(
            {
                "type": "local_shell_call",
                "id": "l",
                "call_id": "c",
                "status": "completed",
                "action": {"type": "exec", "command": ["ls"], "env": {}},
            }
        ),
    ),
    done(
        "input: local_shell_call_output",
        _items({"type": "local_shell_call_output", "id": "c", "output": "a.txt"}),
    ),
    done(
        "input: shell_call",
        _items({"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}),
    ),
    done(
        "input: shell_call_output",
        _items(
            {
                "type": "shell_call_output",
                "call_id": "c",
                "output": [
                    {"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
                ],
            }
        ),
    ),
    done(
        "input: apply_patch_call",
        _items(
            {
                "type": "apply_patch_call",
                "call_id": "c",
                "status": "completed",
                "operation": {"type": "delete_file", "path": "a"},
            }
        ),
    ),
    done(
        "input: apply_patch_call_output",
        _items({"type": "apply_patch_call_output", "call_id": "c", "status": "failed"}),
    ),
    done(
        "input: code_interpreter_call",
        _items(
            {
                "type": "code_interpreter_call",
                "id": "ci",
                "code": "print(1)",
                "container_id": "x",
                "outputs": [{"type": "logs", "logs": "1"}],
                "status": "completed",
            }
        ),
    ),
    done(
        "input: web_search_call",
        _items(
            {
                "type": "web_search_call",
                "id": "ws",
                "status": "completed",
                "action": {"type": "search", "query": "snow"},
            }
        ),
    ),
    done(
        "input: file_search_call",
        _items(
            {
                "type": "file_search_call",
                "id": "fs",
                "queries": ["snow"],
                "status": "completed",
                "results": [{"text": "deep"}],
            }
        ),
    ),
    done("input: program", _items({"type": "program", "call_id": "c", "code": "f()"})),
    done(
        "input: program_output",
        _items({"type": "program_output", "call_id": "c", "result": "1", "status": "completed"}),
    ),
    refused(
        "input: item_reference",
        "Item with id 'msg_1' not found.",
        _items({"type": "item_reference", "id": "msg_1"}),
    ),
    *(
        refused(f"input: {kind}", kind, _items({"type": kind, "id": "x"}))
        for kind in (
            "additional_tools",
            "compaction_trigger",
            "computer_call",
            "computer_call_output",
            "image_generation_call",
            "mcp_approval_request",
            "mcp_approval_response",
            "tool_search_call",
            "tool_search_output",
        )
    ),
]
