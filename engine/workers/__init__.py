"""Processes that do what a client can make expensive, and that can be ended while they do it.

A thread does not help against native code that keeps the interpreter (a regular expression, the
validation of a body) or that overflows the stack. ``Workers`` runs a function in a process with a
limit on its CPU time, its memory and its stack, and says which of them a job has exceeded.
"""
