// A link that is played, so that a worker can be measured alone: it lets the worker mint, and sends every frame back.
//   link RUN_DIR                 listens at RUN_DIR/link.sock until the worker ends
// Per EVENTS message one FRAMES message and the credit, as a shard's stream returns them: frames in a row for one connection are one
// item, a run. A payload that begins with 'F' goes to every connection, once as payload, with a suffix of 10 bytes for each: what a
// push carries of run and push_no.
// The lane's messages are those of plato_gateway/core/lanes.py.
#include "net.h"
#include <sys/stat.h>
#include <sys/un.h>

enum { HELLO = 1, EVENTS_ = 2, CONFIG = 16, SLOTS = 17, ANNOUNCE = 18, CREDIT = 20, FRAMES = 21 };
enum { OPENED = 1, DATA = 2, CLOSED = 3 };
enum { RUN = 2 };  // of flags
#define SUFFIX 10
#define COST 13  // of an event beyond its data

typedef struct {
    uint8_t *at;
    size_t have, size;
} Bytes;

static int lane;
static Bytes out, lengths, payloads, ids, suffix_lengths, suffixes, flags, in;
static uint64_t *live;
static size_t live_have, live_count;

static void add(Bytes *to, const void *data, size_t size) {
    to->at = grown(to->at, &to->have, to->size + size);
    if (data) memcpy(to->at + to->size, data, size);
    else memset(to->at + to->size, 0, size);
    to->size += size;
}

static void head(uint8_t type, size_t body) {
    uint32_t length = (uint32_t)body + 1;
    add(&out, &length, 4);
    add(&out, &type, 1);
}

static void send_all(void) {
    for (size_t at = 0; at < out.size;) {
        ssize_t n = write(lane, out.at + at, out.size - at);
        if (n <= 0) exit(0);  // the worker ended
        at += (size_t)n;
    }
    out.size = 0;
}

static void fan_out(const uint8_t *payload, uint32_t size) {
    head(FRAMES, 12 + 4 + size + (14 + SUFFIX) * live_count);
    add(&out, (uint32_t[3]){1, size, (uint32_t)live_count}, 12);
    add(&out, &size, 4);
    add(&out, payload, size);
    add(&out, live, 8 * live_count);
    add(&out, NULL, 4 * live_count);  // all have payload 0
    out.at = grown(out.at, &out.have, out.size + live_count);
    memset(out.at + out.size, SUFFIX, live_count);
    out.size += live_count;
    add(&out, NULL, live_count);  // flags
    out.at = grown(out.at, &out.have, out.size + SUFFIX * live_count);
    memset(out.at + out.size, 'S', SUFFIX * live_count);
    out.size += SUFFIX * live_count;
}

static void take_events(const uint8_t *body, size_t size) {
    uint32_t count;
    memcpy(&count, body + 9, 4);
    const uint8_t *kinds = body + 13, *conn_ids = kinds + count, *sizes = conn_ids + 8 * (size_t)count;
    const uint8_t *data = sizes + 4 * (size_t)count;
    uint64_t cost = size - 13;
    lengths.size = payloads.size = ids.size = flags.size = suffix_lengths.size = suffixes.size = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t n;
        uint64_t conn_id;
        memcpy(&n, sizes + 4 * (size_t)i, 4);
        memcpy(&conn_id, conn_ids + 8 * (size_t)i, 8);
        if (kinds[i] == OPENED) {
            live = grown(live, &live_have, 8 * (live_count + 1));
            live[live_count++] = conn_id;
        } else if (kinds[i] == CLOSED) {
            for (size_t k = live_count; k-- > 0;)
                if (live[k] == conn_id) {
                    live[k] = live[--live_count];
                    break;
                }
        } else if (kinds[i] == DATA && data[4] == 'F') {
            fan_out(data + 4, n - 4);
        } else if (kinds[i] == DATA) {
            uint32_t count = 0, head_bytes = 0, length;
            for (const uint8_t *at = data, *end = data + n; at < end; at += 4 + big_endian(at)) count++;
            uint8_t flag = count > 1 ? RUN : 0, suffix = count > 1 ? 4 : 0;
            if (count == 1) head_bytes = 4;  // a frame alone travels without its length
            length = n - head_bytes;
            add(&lengths, &length, 4);
            add(&payloads, data + head_bytes, length);
            add(&ids, &conn_id, 8);
            add(&flags, &flag, 1);
            add(&suffix_lengths, &suffix, 1);
            add(&suffixes, &count, suffix);
        }
        data += n;
    }
    uint32_t items = (uint32_t)(ids.size / 8);
    if (items) {
        head(FRAMES, 12 + 4 * (size_t)items + payloads.size + 14 * (size_t)items + suffixes.size);
        add(&out, (uint32_t[3]){items, (uint32_t)payloads.size, items}, 12);
        add(&out, lengths.at, lengths.size);
        add(&out, payloads.at, payloads.size);
        add(&out, ids.at, ids.size);
        out.at = grown(out.at, &out.have, out.size + 4 * (size_t)items);
        for (uint32_t i = 0; i < items; i++) memcpy(out.at + out.size + 4 * (size_t)i, &i, 4);
        out.size += 4 * (size_t)items;
        add(&out, suffix_lengths.at, suffix_lengths.size);
        add(&out, flags.at, flags.size);
        add(&out, suffixes.at, suffixes.size);
    }
    head(CREDIT, 9);
    add(&out, body, 1);
    add(&out, &cost, 8);
}

static void welcome(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    uint64_t from = (uint64_t)t.tv_sec * 1000, until = from + 3600000, attach = 1, credit = 4194304;
    uint16_t worker_id = 1;
    uint8_t group = 0, slots[128];
    memset(slots, 255, sizeof slots);
    head(SLOTS, 1024);
    add(&out, NULL, 1024);
    head(CONFIG, 18 + 128);
    add(&out, &worker_id, 2);
    add(&out, &from, 8);
    add(&out, &until, 8);
    add(&out, slots, 128);
    head(ANNOUNCE, 17);
    add(&out, &group, 1);
    add(&out, &attach, 8);
    add(&out, &credit, 8);
    send_all();
}

int main(int argc, char **argv) {
    if (argc != 2) return 64;
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(a.sun_path, sizeof a.sun_path, "%s/link.sock", argv[1]);
    int listener = socket(AF_UNIX, SOCK_STREAM, 0), room = 1048576;
    if (bind(listener, (struct sockaddr *)&a, sizeof a) || listen(listener, 1)) die("cannot listen at %s", a.sun_path);
    lane = accept(listener, NULL, NULL);
    setsockopt(lane, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    setsockopt(lane, SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
    welcome();
    for (;;) {
        in.at = grown(in.at, &in.have, in.size + 1048576);
        ssize_t n = read(lane, in.at + in.size, 1048576);
        if (n <= 0) return 0;
        in.size += (size_t)n;
        size_t at = 0;
        while (in.size - at >= 4) {
            uint32_t length;
            memcpy(&length, in.at + at, 4);
            if (in.size - at < 4 + (size_t)length) break;
            if (in.at[at + 4] == EVENTS_) take_events(in.at + at + 5, length - 1);
            at += 4 + (size_t)length;
        }
        memmove(in.at, in.at + at, in.size - at);
        in.size -= at;
        if (out.size) send_all();
    }
}
