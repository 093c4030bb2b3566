"""Structured output: restricts a row's tokens to those that a formal grammar allows.

llguidance compiles a grammar and computes which tokens of the vocabulary may come next; this
package prepares its input and bounds its cost. Public face: ``checker.Checker`` (API process, with
trials in worker processes), ``pending.Grammars`` and ``constraints.Constraints`` (engine process).
Must not import the engine's core.
"""
