/* Makes writes and syncs of a server fail while a file named by FAULTS exists. The file has three words: the calls that
 * fail (write or sync), the error's number, and a part of the path of the files that they fail for. Preloaded by
 * disk.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int fails(const char *call, int fd)
{
    char calls[16], part[64], link[64], path[4096];
    int number = 0, saved = errno;
    const char *faults = getenv("FAULTS");
    FILE *file = faults && access(faults, F_OK) == 0 ? fopen(faults, "r") : NULL;
    if (file) {
        int words = fscanf(file, "%15s %d %63s", calls, &number, part);
        fclose(file);
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, path, sizeof path - 1);
        if (words == 3 && length > 0 && strcmp(calls, call) == 0) {
            path[length] = 0;
            if (strstr(path, part)) {
                errno = number;
                return 1;
            }
        }
    }
    errno = saved;
    return 0;
}

#define NEXT(type, name, ...) ((type (*)(__VA_ARGS__)) dlsym(RTLD_NEXT, name))

int fsync(int fd)
{
    return fails("sync", fd) ? -1 : NEXT(int, "fsync", int)(fd);
}

int fdatasync(int fd)
{
    return fails("sync", fd) ? -1 : NEXT(int, "fdatasync", int)(fd);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at)
{
    return fails("write", fd) ? -1 : NEXT(ssize_t, "pwrite64", int, const void *, size_t, off64_t)(fd, data, size, at);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at)
{
    return pwrite64(fd, data, size, at);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at)
{
    return fails("write", fd) ? -1 : NEXT(ssize_t, "pwritev64", int, const struct iovec *, int, off64_t)(fd, parts, count, at);
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at)
{
    return pwritev64(fd, parts, count, at);
}

int posix_fallocate64(int fd, off64_t at, off64_t size)
{
    return fails("write", fd) ? errno : NEXT(int, "posix_fallocate64", int, off64_t, off64_t)(fd, at, size);
}

int posix_fallocate(int fd, off_t at, off_t size)
{
    return posix_fallocate64(fd, at, size);
}
