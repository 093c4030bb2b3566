"""Chat: from a conversation to a prompt and a grammar, and from output tokens to reasoning, text
and tool calls.

``prepare`` is the entry point for every chat API (chat completions, Messages, Responses). It
renders the prompt with the model's template (``rendering``, ``template``, ``tool_form``) and plans
reasoning and calls (``thoughts``, ``tool_plan``). ``DialogueChoice`` reads a reply: ``splitter``
finds the tags, ``calls`` parses calls, ``sections`` groups what came for APIs whose replies are
lists of items. Everything runs on the API process's event loop, except that large prompts are
rendered in a thread. The package must not import MLX, the cache or the scheduler; ``splitter``
loads mlx-lm, so modules that the command line needs import it for type checking only.
"""
