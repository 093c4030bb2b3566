"""The flags of ``chairlift serve``, one module for each group of its help.

``add_arguments`` adds a group's flags, and in most modules a function makes the settings of them.
"""
