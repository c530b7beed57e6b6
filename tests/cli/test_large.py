"""A rank of a large checkpoint reads its own experts and nothing of the others: resident pages are counted."""

import ctypes
import mmap
import os
import sys
import unittest

import fx
from command import Case

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "checkpoint"))
import make_sparse  # noqa: E402

EXPERTS = 128  # of 37 MB: 4.8 GB, holes on the disk


def resident(path):
    """One flag for each page of a file: is it in memory?"""
    libc = ctypes.CDLL(None, use_errno=True)
    size = os.path.getsize(path)
    pages = -(-size // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as view:
        whole = (ctypes.c_char * size).from_buffer(view)
        address = ctypes.addressof(whole)
        failed = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), flags)
        del whole
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return flags


def bytes_by_expert(path):
    """(expert, resident bytes, bytes) of every large tensor of an expert in a shard."""
    flags = resident(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = fx.json.loads(file.read(length))
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        if ".experts." not in name or end - begin < 4096:
            continue
        first, last = -(-begin // mmap.PAGESIZE), end // mmap.PAGESIZE
        held = sum(flags[page] & 1 for page in range(first, last)) * mmap.PAGESIZE
        yield int(name.split(".experts.")[1].split(".")[0]), name, held, (last - first) * mmap.PAGESIZE


class Large(Case):
    def test_a_rank_reads_its_experts_only(self):
        make_sparse.main(self.path("c"), layers=1, experts=EXPERTS)
        shards = sorted(f for f in os.listdir(self.path("c")) if f.endswith(".safetensors"))
        self.assertGreater(sum(os.path.getsize(self.path("c", f)) for f in shards), 4 << 30)
        rows = [[0.5] * make_sparse.H] * 2
        ids = [[40, 41, 42, 43, 44, 45], [45, 44, 43, 42, 41, 50]]
        fx.save_input(self.path("x"), rows, ids, [[0.5] * 6] * 2)
        self.command("run", "c", "--layer", 0, "--experts", "40:54", "--input", "x", "--output", "y")
        chosen = {expert for row in ids for expert in row}
        held, foreign, foreign_size = 0, 0, 0
        for shard in shards:
            for expert, name, inside, size in bytes_by_expert(self.path("c", shard)):
                if expert in chosen or (name.endswith("weight_scale") and 40 <= expert < 54):
                    held += inside
                    self.assertGreater(inside, size / 2, f"{name} was not read")  # the system may take pages back
                elif not 40 <= expert < 54:
                    foreign += inside
                    foreign_size += size
        self.assertGreater(held, 7 * 33e6 / 2)
        # only what the system reads ahead at the borders of the rank's experts
        self.assertLess(foreign, 0.01 * foreign_size, "experts of other ranks were read")


if __name__ == "__main__":
    unittest.main()
