"""How often a program waits for the values of a device."""

from torch.utils._python_dispatch import TorchDispatchMode


class Waits(TorchDispatchMode):
    """Counts what reads values of the device, and copies in both directions that the host waits for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name, late = function.overloadpacket.__name__, (kwargs or {}).get("non_blocking")
        if name == "copy_":
            late = late or (len(args) > 2 and args[2])
            self.count += not late and args[1].device != args[0].device
        elif name == "_to_copy":
            self.count += not late and result.device != args[0].device
        elif name in ("_local_scalar_dense", "nonzero"):
            self.count += args[0].device.type == "mps"
        return result
