"""The address by which other machines reach this one."""

import socket


def own_address() -> str:
    """Return the address of the interface that leads outside; the machine's name if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # chooses an interface and sends nothing: a datagram socket only notes the address,
            # which is one that RFC 5737 keeps for documentation
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return socket.gethostname()
        address: str = probe.getsockname()[0]
        return address
