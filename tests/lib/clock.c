// A wall clock that is wrong by as many seconds as the file $CLOCK says, an int64, at every moment.
// Preloaded into a process; its monotonic clocks stay. What waits until a time of the wall clock, as
// Triton's Python backend does, waits by the wrong one.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset;

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK"), O_RDONLY);
    void *found = mmap(0, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    offset = found == MAP_FAILED ? 0 : found;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int result = syscall(SYS_gettimeofday, now, zone);
    if (offset) now->tv_sec += *offset;
    return result;
}

time_t time(time_t *seconds) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (seconds) *seconds = now.tv_sec;
    return now.tv_sec;
}

static struct timespec kernels(const struct timespec *until) {
    struct timespec result = *until;
    if (offset && result.tv_sec > 1000000000) result.tv_sec -= *offset;  // else it is monotonic
    return result;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    int (*wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *) =
        dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    struct timespec real = kernels(until);
    return wait(condition, mutex, &real);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    int (*wait)(pthread_mutex_t *, const struct timespec *) = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
    struct timespec real = kernels(until);
    return wait(mutex, &real);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    int (*wait)(sem_t *, const struct timespec *) = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec real = kernels(until);
    return wait(semaphore, &real);
}
