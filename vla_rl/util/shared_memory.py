"""Memory that processes share: a file without a name, which nothing leaves behind.

Its size is final. If one process could shorten it, SIGBUS would end another that reads or writes
there.
"""

import errno
import fcntl
import os
import resource


def memory_file(name: str, num_bytes: int) -> int:
    """Return the descriptor of new memory, zeros; it is freed with its last user.

    Args:
        name: shown by the kernel, for people.
        num_bytes: its size.

    Raises: OSError naming the limit, if a limit forbids this size.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        os.close(descriptor)
        most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if error.errno == errno.EFBIG and most != resource.RLIM_INFINITY:
            raise OSError(
                errno.EFBIG,
                f"{num_bytes} bytes of memory for processes to share cannot be made: the limit on the "
                f"size of files is {most} bytes and holds for them too, expected none; set `ulimit -f "
                "unlimited`",
            ) from None
        raise
    return descriptor
