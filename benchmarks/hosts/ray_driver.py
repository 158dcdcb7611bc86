"""The driver of `ray_store`, run by an interpreter that has Ray: arrays from an actor on another node.

    python benchmarks/hosts/ray_driver.py ADDRESS OWN_IP BYTES IN_FLIGHT

Each line that it reads is a number of arrays to receive; it answers with a line when it has them.
"""

import sys

import numpy as np
import ray


class Source:
    """Has pixels."""

    def __init__(self, num_bytes: int) -> None:
        self._pixels = np.random.default_rng(0).integers(0, 255, num_bytes, np.uint8)

    def pixels(self) -> np.ndarray:
        """Return all of them, through the object store."""
        return self._pixels


def main() -> None:
    """Receive what stdin asks for."""
    address, own_ip, num_bytes, in_flight = sys.argv[1:]
    ray.init(address=address, _node_ip_address=own_ip, log_to_driver=False)
    source = ray.remote(Source).options(resources={"far": 1}).remote(int(num_bytes))
    ray.get(source.pixels.remote())
    print("ready", flush=True)
    for line in sys.stdin:
        for _ in range(int(line) // int(in_flight)):
            ray.get([source.pixels.remote() for _ in range(int(in_flight))])
        print("received", flush=True)


if __name__ == "__main__":
    main()
