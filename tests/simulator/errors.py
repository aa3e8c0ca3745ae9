"""The errors of the simulator."""


class BuildError(RuntimeError):
    """A tool is missing, or a source does not compile; the text is what the user has to read."""


class SimulatorError(RuntimeError):
    """A fault that the simulator found in a shader or in host code while it ran."""


class ShaderError(RuntimeError):
    """A shader that does not compile; the message has `file:line:column: error: text` lines, as in Metal."""
