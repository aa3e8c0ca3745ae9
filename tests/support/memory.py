"""The memory that tensors take and that operators write."""

from collections.abc import Iterable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(TorchDispatchMode):
    """Counts the bytes that operators write, and those that tensors hold: now, and the most at a time.

    Of tensors that were made before, it knows those that it is given.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()):
        super().__init__()
        self.written = self.peak = 0
        self.sizes: dict[StorageWeakRef, int] = {}
        self.watch(tensors)

    def watch(self, tensors: Iterable[Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        self.sizes |= {StorageWeakRef(storage): storage.nbytes() for storage in storages}
        self.peak = max(self.peak, self.held())

    def held(self) -> int:
        self.sizes = {storage: size for storage, size in self.sizes.items() if not storage.expired()}
        return sum(self.sizes.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.watch(tensors)
        if not function.is_view and "empty" not in str(function):
            self.written += sum(tensor.nbytes for tensor in tensors)
        return out
