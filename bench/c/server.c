// The yardstick: a plain epoll server, one thread, level-triggered, a read and a write per event.
//   server            prints its port, serves until killed
// A frame is a 4-byte big-endian length and a payload. What is read is written back as it is, save a payload that begins
// with 'F': it goes to every connection (fan-out). What a full socket does not take waits in a buffer of its own.
#include "net.h"

typedef struct {
    char *data;
    size_t have, size, at;
} Waiting;

static int ep;
static Waiting *waiting;
static char *live;
static int top;

static void put(int fd, const char *data, size_t size) {
    Waiting *w = &waiting[fd];
    size_t done = 0;
    if (w->size == w->at) {
        ssize_t n = write(fd, data, size);
        if (n < 0 && errno != EAGAIN) return;  // the next read finds it broken
        if (n > 0) done = (size_t)n;
        if (done == size) return;
        w->size = w->at = 0;
        watch(ep, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLOUT);
    }
    w->data = grown(w->data, &w->have, w->size + size - done);
    memcpy(w->data + w->size, data + done, size - done);
    w->size += size - done;
}

static void flush(int fd) {
    Waiting *w = &waiting[fd];
    ssize_t n = write(fd, w->data + w->at, w->size - w->at);
    if (n > 0) w->at += (size_t)n;
    if (w->at == w->size) watch(ep, EPOLL_CTL_MOD, fd, EPOLLIN);
}

int main(void) {
    all_files();
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    waiting = calloc(limit.rlim_cur, sizeof *waiting);
    live = calloc(limit.rlim_cur, 1);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    ep = epoll_create1(0);
    struct sockaddr_in a = loopback(0);
    socklen_t size = sizeof a;
    if (bind(listener, (struct sockaddr *)&a, sizeof a) || listen(listener, 4096)) die("cannot listen");
    getsockname(listener, (struct sockaddr *)&a, &size);
    printf("%d\n", ntohs(a.sin_port));
    fflush(stdout);
    watch(ep, EPOLL_CTL_ADD, listener, EPOLLIN);
    struct epoll_event got[EVENTS];
    static char buffer[65536];
    for (;;) {
        int n = epoll_wait(ep, got, EVENTS, -1);
        for (int i = 0; i < n; i++) {
            int fd = got[i].data.fd;
            if (fd == listener) {
                for (int k = 0; k < 64; k++) {
                    int c = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
                    if (c < 0) break;
                    nodelay(c);
                    live[c] = 1;
                    if (c > top) top = c;
                    waiting[c].size = waiting[c].at = 0;
                    watch(ep, EPOLL_CTL_ADD, c, EPOLLIN);
                }
                continue;
            }
            if (got[i].events & EPOLLOUT) flush(fd);
            if (!(got[i].events & ~(uint32_t)EPOLLOUT)) continue;
            ssize_t r = read(fd, buffer, sizeof buffer);
            if (r <= 0) {
                if (r == 0 || errno != EAGAIN) {
                    live[fd] = 0;
                    close(fd);
                }
                continue;
            }
            if (r > 4 && buffer[4] == 'F') {
                for (int to = 0; to <= top; to++)
                    if (live[to]) put(to, buffer, (size_t)r);
            } else {
                put(fd, buffer, (size_t)r);
            }
        }
    }
}
