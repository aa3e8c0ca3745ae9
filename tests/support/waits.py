"""How often a program waits for the values of a device."""

from torch.utils._python_dispatch import TorchDispatchMode


class Waits(TorchDispatchMode):
    """Counts what reads values of the device: numbers, and copies that the host waits for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name, late = function.overloadpacket.__name__, (kwargs or {}).get("non_blocking")
        if name == "copy_":
            late = late or (len(args) > 2 and args[2])
            self.count += not late and args[1].device.type == "mps" and args[0].device.type == "cpu"
        elif name in ("_local_scalar_dense", "_to_copy", "nonzero"):
            self.count += args[0].device.type == "mps" and getattr(result, "device", None) != args[0].device
        return result
