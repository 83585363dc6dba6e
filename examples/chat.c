/* One turn of a conversation with colibrid, written from docs/protocol.md alone: no library but libc.
 *
 *     cc -std=c17 -o chat examples/chat.c
 *     ./chat /run/user/1000/colibri/colibri.sock alice "What did I ask you yesterday?"
 *
 * Prints the reply as it comes. A frame is read whole, and then walked: `find` steps over what it does not know. */

#define _POSIX_C_SOURCE 200809L
#include <arpa/inet.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static _Noreturn void fail(const char *words) {
    fprintf(stderr, "chat: %s\n", words);
    exit(1);
}

/* Writing msgpack. Longer forms than needed are allowed: a map of up to 15, text with a 4-byte length. */

static unsigned char frame[1 << 16];
static size_t used;

static void put(const void *bytes, size_t n) {
    if (n > sizeof frame - used) fail("the request is too long");
    memcpy(frame + used, bytes, n);
    used += n;
}

static void put_byte(unsigned byte) { put(&(unsigned char){(unsigned char)byte}, 1); }

static void put_text(const char *text) {
    uint32_t length = htonl((uint32_t)strlen(text));
    put_byte(0xdb);
    put(&length, 4);
    put(text, strlen(text));
}

static void send_frame(int fd) {
    uint32_t length = htonl((uint32_t)used);
    if (send(fd, &length, 4, MSG_NOSIGNAL) != 4) fail("the daemon went away");
    for (size_t sent = 0; sent < used;) {
        ssize_t n = send(fd, frame + sent, used - sent, MSG_NOSIGNAL);
        if (n <= 0) fail("the daemon went away");
        sent += (size_t)n;
    }
    used = 0;
}

/* Reading msgpack: one value at a time. */

typedef struct {
    enum { NIL, BOOLEAN, INTEGER, FLOAT, TEXT, ARRAY, MAP } kind;
    uint64_t n; /* the integer; bytes of a text; items of an array; pairs of a map */
    const char *text;
} value;

static const unsigned char *at, *end; /* what is left of the frame */

static uint64_t big_endian(size_t n) {
    uint64_t result = 0;
    if ((size_t)(end - at) < n) fail("a frame ends too early");
    while (n-- > 0) result = result << 8 | *at++;
    return result;
}

static value texts(uint64_t n) {
    const char *text = (const char *)at;
    if ((uint64_t)(end - at) < n) fail("a frame ends too early");
    at += n;
    return (value){TEXT, n, text};
}

static value next(void) {
    unsigned tag = (unsigned)big_endian(1);
    if (tag <= 0x7f) return (value){INTEGER, tag, NULL};
    if (tag <= 0x8f) return (value){MAP, tag & 15, NULL};
    if (tag <= 0x9f) return (value){ARRAY, tag & 15, NULL};
    if (tag <= 0xbf) return texts(tag & 31);
    if (tag >= 0xe0) return (value){INTEGER, (uint64_t)(int64_t)(int8_t)tag, NULL};
    switch (tag) {
    case 0xc0: return (value){NIL, 0, NULL};
    case 0xc2: case 0xc3: return (value){BOOLEAN, tag & 1, NULL};
    case 0xca: case 0xcb: return (value){FLOAT, big_endian(tag == 0xca ? 4 : 8), NULL};
    case 0xcc: case 0xcd: case 0xce: case 0xcf: return (value){INTEGER, big_endian((size_t)1 << (tag - 0xcc)), NULL};
    case 0xd0: case 0xd1: case 0xd2: case 0xd3: return (value){INTEGER, big_endian((size_t)1 << (tag - 0xd0)), NULL};
    case 0xd9: case 0xda: case 0xdb: return texts(big_endian((size_t)1 << (tag - 0xd9)));
    case 0xdc: case 0xdd: return (value){ARRAY, big_endian(tag == 0xdc ? 2 : 4), NULL};
    case 0xde: case 0xdf: return (value){MAP, big_endian(tag == 0xde ? 2 : 4), NULL};
    }
    fail("the daemon sent what the protocol does not have");
}

static void skip(void) {
    value v = next();
    for (uint64_t left = v.kind == MAP ? 2 * v.n : v.kind == ARRAY ? v.n : 0; left > 0; left--) skip();
}

/* Goes to the value of a key in the map that begins at `map`; 0 if it has none. */
static int find(const unsigned char *map, const char *key) {
    at = map;
    value v = next();
    for (uint64_t left = v.kind == MAP ? v.n : 0; left > 0; left--) {
        value name = next();
        if (name.kind == TEXT && name.n == strlen(key) && memcmp(name.text, key, name.n) == 0) return 1;
        skip();
    }
    return 0;
}

static void print(FILE *out, const unsigned char *map, const char *key) {
    value v = find(map, key) ? next() : (value){NIL, 0, NULL};
    if (v.kind == TEXT) fwrite(v.text, 1, v.n, out);
    if (v.kind == INTEGER) fprintf(out, "%llu", (unsigned long long)v.n);
    fflush(out);
}

/* Acts on one answer; 1 when it ends the turn. Kinds that it does not know, such as progress, it passes over. */
static int answer(const unsigned char *start) {
    uint64_t id = find(start, "id") ? next().n : 0;
    if (find(start, "error")) {
        const unsigned char *error = at;
        print(stderr, error, "type"), fputs(": ", stderr), print(stderr, error, "message");
        fputs(" (", stderr), print(stderr, error, "hint"), fputs(")\n", stderr);
        exit(1);
    }
    if (id == 2 && find(start, "token")) print(stdout, at, "text");
    if (id != 2 || !find(start, "done")) return 0;
    const unsigned char *done = at;
    printf("\n["), print(stdout, done, "finish_reason");
    if (find(done, "usage")) {
        const unsigned char *usage = at;
        printf(", prompt "), print(stdout, usage, "prompt_tokens");
        printf(", of it cached "), print(stdout, usage, "cached_tokens");
        printf(", new "), print(stdout, usage, "completion_tokens");
    }
    puts("]");
    return 1;
}

static void read_all(int fd, void *to, size_t n) {
    for (char *p = to; n > 0;) {
        ssize_t got = read(fd, p, n);
        if (got <= 0) fail("the daemon went away");
        p += got, n -= (size_t)got;
    }
}

/* Reads a frame and acts on its answers; 1 when the turn has ended. */
static int read_answers(int fd) {
    uint32_t length;
    read_all(fd, &length, 4);
    length = ntohl(length);
    unsigned char *body = malloc(length + 1);
    if (body == NULL) fail("out of memory");
    read_all(fd, body, length);
    at = body, end = body + length;
    int ended = 0;
    if (find(body, "answers")) {
        for (uint64_t left = next().n; left > 0 && !ended; left--) {
            const unsigned char *start = at;
            skip();
            const unsigned char *following = at;
            ended = answer(start);
            at = following;
        }
    } else {
        ended = answer(body);
    }
    free(body);
    return ended;
}

int main(int argc, char **argv) {
    if (argc != 4) fail("usage: chat SOCKET SESSION TEXT");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(argv[1]) >= sizeof address.sun_path) fail("the socket's path is too long");
    strcpy(address.sun_path, argv[1]);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0) fail("no daemon listens there");

    put_byte(0x84); /* a map of 4 */
    put_text("id"), put_byte(1);
    put_text("op"), put_text("hello");
    put_text("version"), put_byte(1);
    put_text("client"), put_text("chat.c");
    send_frame(fd);

    put_byte(0x85);
    put_text("id"), put_byte(2);
    put_text("op"), put_text("chat");
    put_text("session"), put_text(argv[2]);
    put_text("max_tokens"), put_byte(64);
    put_text("messages"), put_byte(0x91); /* an array of 1 */
    put_byte(0x82), put_text("role"), put_text("user"), put_text("content"), put_text(argv[3]);
    send_frame(fd);

    while (!read_answers(fd)) {
    }
    close(fd);
    return 0;
}
