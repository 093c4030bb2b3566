"""The OpenAI API over HTTP: a request is validated, templated and tokenized here, handed to the
engine client as token ids, and its tokens come back out as text, stop strings cut, over SSE."""
