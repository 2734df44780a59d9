#include <linux/filter.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
static uint64_t x = 5;
static uint32_t next(void) { x = x * 6364136223846793005ull + 1442695040888963407ull; return x >> 33; }
int main(void) {
    static const uint16_t ops[] = { BPF_ADD, BPF_SUB, BPF_MUL, BPF_OR, BPF_AND, BPF_XOR, BPF_LSH, BPF_RSH };
    uint64_t h = 14695981039346656037ull;
    for (int n = 0; n < 400; n++) {
        struct sock_filter f[64];
        int len = 0, s[2];
        f[len++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, next() % 8 * 4);
        f[len++] = (struct sock_filter)BPF_STMT(BPF_MISC | BPF_TAX, 0);
        while (len < 50) {
            uint16_t op = ops[next() % 8];
            uint32_t k = op == BPF_LSH || op == BPF_RSH ? next() % 31 : next();
            switch (next() % 5) {
            case 0: f[len++] = (struct sock_filter)BPF_STMT(BPF_ALU | op | BPF_K, k); break;
            case 1: f[len++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_H | BPF_ABS, next() % 30);
                f[len++] = (struct sock_filter)BPF_STMT(BPF_ALU | BPF_XOR | BPF_X, 0); break;
            case 2: f[len++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, next(), 0, 1);
                f[len++] = (struct sock_filter)BPF_STMT(BPF_ALU | BPF_ADD | BPF_K, k); break;
            case 3: f[len++] = (struct sock_filter)BPF_STMT(BPF_ST, 3);
                f[len++] = (struct sock_filter)BPF_STMT(BPF_LDX | BPF_MEM, 3); break;
            default: f[len++] = (struct sock_filter)BPF_STMT(BPF_LDX | BPF_B | BPF_MSH, next() % 30);
            }
        }
        f[len++] = (struct sock_filter)BPF_STMT(BPF_ALU | BPF_AND | BPF_K, 31);
        f[len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_A, 0);
        struct sock_fprog p = { len, f };
        if (socketpair(AF_UNIX, SOCK_DGRAM, 0, s) || setsockopt(s[1], SOL_SOCKET, SO_ATTACH_FILTER, &p, sizeof p)) {
            perror("filter");
            return 1;
        }
        for (int r = 0; r < 40; r++) {
            uint32_t packet[8], got[8];
            for (int i = 0; i < 8; i++) packet[i] = next();
            send(s[0], packet, sizeof packet, MSG_DONTWAIT);
            long size = recv(s[1], got, sizeof got, MSG_DONTWAIT);
            h = (h ^ (uint64_t)size) * 1099511628211ull;
        }
        close(s[0]);
        close(s[1]);
    }
    printf("%016llx\n", (unsigned long long)h);
    return 0;
}
