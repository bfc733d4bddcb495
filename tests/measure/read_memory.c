/* Reads an array with several threads, once for every line that it is sent, and answers with the
 * seconds that it took and the sum of the array.
 *
 * Independent of torch, to check its read probe against: usage read_memory BYTES THREADS.
 * Every thread writes its own part first, so that its pages exist. A round lasts from the first
 * thread's start to the last one's end. The sum is printed, or the compiler would drop the reading.
 */
#define _POSIX_C_SOURCE 200112L
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_THREADS = 1024 };

static uint64_t *data;
static size_t words;
static int threads, done;
static uint64_t sums[MAX_THREADS];
static double begin[MAX_THREADS], end[MAX_THREADS];
static pthread_barrier_t barrier;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double last_round(void) {
    double first = begin[0], last = end[0];
    for (int i = 1; i < threads; i++) {
        if (begin[i] < first) first = begin[i];
        if (end[i] > last) last = end[i];
    }
    return last - first;
}

static void *reader(void *argument) {
    size_t me = (size_t)argument;
    size_t from = words * me / threads, to = words * (me + 1) / threads;
    for (size_t i = from; i < to; i++) data[i] = i;
    for (;;) {
        char line[16];
        if (me == 0 && fgets(line, sizeof line, stdin) == NULL) done = 1;
        pthread_barrier_wait(&barrier);
        if (done) return NULL;
        begin[me] = now();
        uint64_t sum = 0;
        for (size_t i = from; i < to; i++) sum += data[i];
        end[me] = now();
        sums[me] = sum;
        pthread_barrier_wait(&barrier);
        if (me == 0) {
            for (int i = 1; i < threads; i++) sum += sums[i];
            printf("%.9f %llu\n", last_round(), (unsigned long long)sum);
            fflush(stdout);
        }
    }
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    words = strtoull(arguments[1], NULL, 10) / sizeof *data;
    threads = atoi(arguments[2]);
    if (words == 0 || threads < 1 || threads > MAX_THREADS) return 2;
    data = malloc(words * sizeof *data);
    if (data == NULL || pthread_barrier_init(&barrier, NULL, (unsigned)threads) != 0) return 1;
    pthread_t others[MAX_THREADS];
    for (size_t i = 1; i < (size_t)threads; i++)
        if (pthread_create(&others[i], NULL, reader, (void *)i) != 0) return 1;
    reader((void *)0);
    for (int i = 1; i < threads; i++) pthread_join(others[i], NULL);
    return 0;
}
