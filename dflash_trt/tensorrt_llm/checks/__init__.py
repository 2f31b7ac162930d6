"""The named checks of a deployment, by subject; `table.py` lists them.

A check is a function of a `Case` and the chosen `LlmArgs` that gives what it found. Its name is the
check's, its docstring says what goes wrong, silently or after the GPUs are rented, without it. It
raises NotKnown where a checkpoint does not say enough.
"""
