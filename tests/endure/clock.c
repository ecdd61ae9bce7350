/* Steps the clock of the processes that preload it: they add to the time what the file named by CLOCK holds, eight
 * bytes, in microseconds. The clock that only rises (CLOCK_MONOTONIC) stays as it is, as on a machine whose time is
 * set. Preloaded by world.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *step;
static int (*real_time)(clockid_t, struct timespec *);

__attribute__((constructor)) static void open_step(void)
{
    const char *name = getenv("CLOCK");
    int fd = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    real_time = (int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime");
    if (fd >= 0) {
        void *page = mmap(NULL, sizeof *step, PROT_READ, MAP_SHARED, fd, 0);
        step = page == MAP_FAILED ? NULL : page;
        close(fd);
    }
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    if (!real_time)  /* called by another library's constructor */
        open_step();
    int result = real_time(clock, now);
    if (result == 0 && step && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t micros = now->tv_nsec / 1000 + *step;
        int64_t seconds = micros / 1000000 - (micros % 1000000 < 0);
        now->tv_nsec = now->tv_nsec % 1000 + (micros - seconds * 1000000) * 1000;
        now->tv_sec += seconds;
    }
    return result;
}

int gettimeofday(struct timeval *now, void *zone)
{
    struct timespec at;
    (void) zone;
    clock_gettime(CLOCK_REALTIME, &at);
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result)
{
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (result)
        *result = at.tv_sec;
    return at.tv_sec;
}
