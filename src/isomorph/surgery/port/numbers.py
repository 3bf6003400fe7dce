"""The numbers of a model's parameters, each by its entry: one place for every number of every parameter."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from isomorph.surgery.port.watch import memory_of

# How many random numbers are drawn for one parameter, a prime: no two rows of it are the same.
_BLOCK = 65537


class Entries:
    """The entries of parameters, those of one parameter side by side; -1 is none.

    Those of a whole parameter are in memory of their own. So a view of them says whose they are, and a view of the
    parameter has its numbers: neither is searched for.
    """

    def __init__(self, shapes: Mapping[int, torch.Size]) -> None:
        self._whole: dict[int, Tensor] = {}
        self._first: dict[int, int] = {}
        self._by_memory: dict[int, int] = {}
        count = 0
        for parameter, shape in shapes.items():
            entries = torch.arange(count, count + shape.numel(), dtype=torch.int32).view(shape)
            self._whole[parameter] = entries
            self._first[parameter] = count
            self._by_memory[memory_of(entries)] = parameter
            count += shape.numel()

    def of_parameter(self, parameter: int) -> Tensor:
        """Return the entries of a parameter."""
        return self._whole[parameter]

    def owner(self, entries: Tensor) -> int | None:
        """Return the parameter of whose entries some are a view; None if they are no view."""
        return self._by_memory.get(memory_of(entries))

    def owners(self, entries: Tensor) -> list[int]:
        """Return the parameters that entries belong to."""
        owner = self.owner(entries)
        if owner is not None:
            return [owner]
        numbers = list(self._first)
        first = torch.tensor(list(self._first.values()))
        ranks = torch.searchsorted(first, entries.flatten().long(), right=True)
        ranks_present = ranks.bincount(minlength=1).nonzero().flatten().tolist()
        return [numbers[rank - 1] for rank in ranks_present if rank]

    def is_whole(self, entries: Tensor) -> bool:
        """True for all entries of a parameter in order, in any shape."""
        owner = self.owner(entries)
        if owner is None:
            return False
        return entries.is_contiguous() and entries.numel() == self._whole[owner].numel()

    def parts(self, entries: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the parameters of flat entries, which of these are of it, and their places in it."""
        for parameter in self.owners(entries):
            positions = entries - self._first[parameter]
            inside = (positions >= 0) & (positions < self._whole[parameter].numel())
            yield parameter, inside, positions[inside]


class Numbers:
    """A number for every entry, in a tensor for each parameter; of one that is written to in part a copy is made."""

    def __init__(self, entries: Entries, tensors: Mapping[int, Tensor]) -> None:
        self.entries = entries
        self.tensors = dict(tensors)
        # The parameters that have been written to, and those of which this has a copy.
        self.written: set[int] = set()
        self._copied: set[int] = set()

    def pick(self, entries: Tensor) -> Tensor:
        """Return the numbers at entries, 0 for none; a view where the entries are one."""
        owner = self.entries.owner(entries)
        if owner is not None:
            row = self.tensors[owner].contiguous().view(-1)
            return row.as_strided(entries.size(), entries.stride(), entries.storage_offset())
        picked = torch.zeros(entries.numel(), dtype=torch.float64)
        for parameter, inside, positions in self.entries.parts(entries.reshape(-1)):
            picked[inside] = self.tensors[parameter].reshape(-1)[positions].double()
        return picked.view(entries.shape)

    def put(self, entries: Tensor, values: Tensor) -> None:
        """Write numbers at entries, as many as these."""
        owners = self.entries.owners(entries)
        self.written.update(owners)
        if self.entries.is_whole(entries):
            self.tensors[owners[0]] = values.reshape(self.tensors[owners[0]].shape)
            self._copied.discard(owners[0])
            return
        if self.entries.owner(entries) is not None and entries.is_contiguous():
            self._copy_of(owners[0])
            self.pick(entries).copy_(values.reshape(entries.shape))
            return
        values = values.reshape(-1)
        for parameter, inside, positions in self.entries.parts(entries.reshape(-1)):
            row = self._copy_of(parameter)
            row[positions] = values[inside].to(row.dtype)

    def _copy_of(self, parameter: int) -> Tensor:
        """Return a parameter as a row that can be written to."""
        if parameter not in self._copied:
            row = self.tensors[parameter].clone(memory_format=torch.contiguous_format)
            self.tensors[parameter] = row
            self._copied.add(parameter)
        return self.tensors[parameter].view(-1)


def random_numbers(count: int, generator: torch.Generator) -> Tensor:
    """Return numbers from 0 to 1: random ones, which repeat after as many as a prime, since drawing them takes long."""
    block = torch.rand(min(count, _BLOCK), generator=generator, dtype=torch.float64)
    return block.repeat(count // _BLOCK + 1)[:count]
