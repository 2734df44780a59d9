/* The workloads of `anykvm bench`: `program NAME` runs one and prints a line
 *
 *     @ NAME NANOSECONDS CHECKSUM
 *
 * The same binary runs natively and in guests, so the checksums have to agree.
 *
 *     program run NAME CHECK COMMAND…   times a program; CHECK is `out` (its output is the
 *                                       checksum), `none`, or a file that it writes
 *     program text BYTES                prints text that compresses like prose
 *
 * With COUNT in its environment counters of the processor run meanwhile, and the name ends with `:COUNT`:
 * `1` instructions of its own, `2` branches as well, `4` conditional ones and returns as well, `l` instructions, branches
 * and loads, `k` instructions of its own and of the kernel's for it, `sHZ` samples of all that processor 0 does, `sHZxN` by so many events, each of which interrupts.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/perf_event.h>
#include <immintrin.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

/*
 * Cycles; instructions; branches: all, conditional, returns, taken, far, indirect or calls; two more of cycles. Of Intel's
 * conditional branches those that are not taken, whose event is the same on all models.
 */
static const uint64_t events[2][10] = {
	{ 0x3c, 0xc0, 0xc4, 0x10c4, 0x8c4, 0x20c4, 0x40c4, 0x2c4, 0x3c, 0x13c },
	{ 0x76, 0xc0, 0xc2, 0xd1, 0xc8, 0xc4, 0xc6, 0xcc, 0x76, 0x100000120 },
};

static const uint64_t loads[2] = { 0x81d0, 0x529 };

static void event(uint64_t config, uint64_t frequency, int user)
{
	struct perf_event_attr a = { .size = sizeof a, .type = PERF_TYPE_RAW, .config = config };
	if (frequency) {
		a.freq = 1;
		a.sample_freq = frequency;
		a.sample_type = PERF_SAMPLE_IP | PERF_SAMPLE_TID | PERF_SAMPLE_TIME | PERF_SAMPLE_PERIOD;
	} else {
		a.inherit = a.exclude_hv = 1;
		a.exclude_kernel = user;
	}
	int f = syscall(SYS_perf_event_open, &a, frequency ? -1 : 0, frequency ? 0 : -1, -1, 0);
	if (f < 0 || (frequency && mmap(0, 129 << 12, PROT_READ, MAP_SHARED, f, 0) == MAP_FAILED)) {
		perror("perf_event_open");
		exit(1);
	}
}

/* Counts what COUNT says. */
static void count(void)
{
	const char *what = getenv("COUNT");
	if (!what)
		return;
	const uint64_t *e = events[!!__builtin_cpu_is("amd")];
	if (*what == 's') {
		const char *n = strchr(what, 'x');
		for (int i = 0; i < (n ? atoi(n + 1) : 1); i++)
			event(e[i], atol(what + 1), 0);
		return;
	}
	int n = *what == 'k' ? 1 : *what == 'l' ? 2 : *what - '0';
	for (int i = 1; i <= n; i++)
		event(e[i], 0, *what != 'k');
	if (*what == 'l')
		event(loads[!!__builtin_cpu_is("amd")], 0, 1);
}

static void report(const char *name, uint64_t time, uint64_t sum)
{
	const char *what = getenv("COUNT");
	printf("@ %s%s%s %llu %llx\n", name, what ? ":" : "", what ? what : "", (unsigned long long)time,
	       (unsigned long long)sum);
}

static uint64_t mix(uint64_t h, uint64_t v)
{
	return (h ^ v) * 1099511628211ull;
}

static uint64_t next(uint64_t *x)
{
	*x = *x * 6364136223846793005ull + 1442695040888963407ull;
	return *x >> 33;
}

/* A workload returns its checksum; what it needs before the clock runs is in `prepare`. */

static uint64_t sieve(void)
{
	enum { N = 2000000 };
	static char s[N];
	uint64_t count = 0;
	for (int r = 0; r < 6; r++) {
		memset(s, 0, N);
		for (long i = 2; i < N; i++)
			if (!s[i]) {
				count++;
				for (long j = i * 2; j < N; j += i)
					s[j] = 1;
			}
	}
	return count;
}

static int by_value(const void *a, const void *b)
{
	int x = *(const int *)a, y = *(const int *)b;
	return (x > y) - (x < y);
}

static uint64_t sort(void)
{
	enum { N = 500000 };
	int *v = malloc(N * sizeof *v);
	uint64_t x = 1, h = 0;
	for (int i = 0; i < N; i++)
		v[i] = next(&x);
	qsort(v, N, sizeof *v, by_value);
	for (int i = 0; i < N; i += 1000)
		h = mix(h, v[i]);
	return h;
}

static uint64_t *table;
enum { SLOTS = 64 << 20 >> 3 };

static void touch_table(void)
{
	table = mmap(0, SLOTS * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	for (long i = 0; i < SLOTS; i += 512)
		table[i] = 0;
}

static uint64_t hash64m(void)
{
	uint64_t x = 1, s = 0;
	for (int i = 0; i < 3000000; i++) {
		x = x * 6364136223846793005ull + 1442695040888963407ull;
		s += table[x >> 20 & (SLOTS - 1)]++;
	}
	return mix(s, x);
}

/* A byte code with a dispatch loop: counts the steps of Collatz sequences. */
__attribute__((noinline)) static uint64_t execute(const unsigned char *code, uint64_t *r)
{
	uint64_t steps = 0;
	for (const unsigned char *p = code;;) {
		steps++;
		switch (*p++) {
		case 0: return steps;
		case 1: r[p[0]] = p[1]; p += 2; break;
		case 2: r[p[0]] += r[p[1]]; p += 2; break;
		case 3: r[p[0]] += (signed char)p[1]; p += 2; break;
		case 4: r[p[0]] = r[p[1]]; p += 2; break;
		case 5: r[p[0]] >>= 1; p++; break;
		case 6: p += r[p[0]] & 1 ? 2 + (signed char)p[1] : 2; break;
		case 7: p += r[p[0]] != r[p[1]] ? 3 + (signed char)p[2] : 3; break;
		case 8: p += 1 + (signed char)p[0]; break;
		case 9: r[p[0]] *= r[p[1]]; p += 2; break;
		case 10: r[p[0]] ^= r[p[1]] << 7; p += 2; break;
		}
	}
}

static uint64_t bytecode(void)
{
	static const unsigned char code[] = {
		1, 0, 1,     /* r0 = 1: the number */
		1, 5, 1,     /* r5 = 1 */
		1, 6, 3,     /* r6 = 3 */
		3, 0, 1,     /* 9: r0++ */
		4, 1, 0,     /* r1 = r0 */
		6, 1, 4,     /* 15: odd? to 22 */
		5, 1,        /* r1 >>= 1 */
		8, 6,        /* to 28 */
		9, 1, 6,     /* 22: r1 *= 3 */
		3, 1, 1,     /* r1++ */
		3, 2, 1,     /* 28: r2++ */
		10, 3, 1,    /* r3 ^= r1 << 7 */
		7, 1, 5, (unsigned char)-23, /* r1 != 1: to 15 */
		7, 0, 4, (unsigned char)-33, /* r0 != limit: to 9 */
		0,
	};
	uint64_t r[8] = { 0 };
	r[4] = 40000;
	uint64_t steps = execute(code, r);
	return mix(mix(steps, r[2]), r[3]);
}

__attribute__((noinline)) static int fibonacci(int n)
{
	return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2);
}

static uint64_t fib(void)
{
	volatile int n = 36;
	return fibonacci(n);
}

static uint64_t add1(uint64_t v) { return v + 1; }
static uint64_t rotate(uint64_t v) { return v << 7 | v >> 57; }
static uint64_t scramble(uint64_t v) { return v * 0x9e3779b97f4a7c15ull; }
static uint64_t invert(uint64_t v) { return ~v; }

static uint64_t vcall(void)
{
	static uint64_t (*const volatile f[])(uint64_t) = { add1, rotate, scramble, invert };
	uint64_t v = 1;
	for (int i = 0; i < 20000000; i++)
		v = f[v >> 11 & 3](v);
	return v;
}

static uint64_t strings(void)
{
	enum { LEN = 200 };
	static char pool[4096][LEN];
	uint64_t x = 7, h = 0;
	for (int i = 0; i < 4096; i++) {
		int n = next(&x) % (LEN - 2) + 1;
		for (int k = 0; k < n; k++)
			pool[i][k] = 'a' + next(&x) % 26;
		pool[i][n] = 0;
	}
	for (int i = 0; i < 300000; i++) {
		const char *a = pool[next(&x) & 4095], *b = pool[next(&x) & 4095];
		const char *e = strchr(a, 'e');
		h = mix(h, strlen(a) + (strcmp(a, b) > 0) + (e ? e - a : 0));
		for (const char *p = b; *p; p++)
			h += (unsigned char)*p == 'q';
		h += memcmp(a, b, 3) > 0;
	}
	return h;
}

static uint64_t crc(void)
{
	static uint32_t t[256];
	static unsigned char buffer[1 << 16];
	uint64_t x = 3;
	for (uint32_t i = 0; i < 256; i++) {
		uint32_t c = i;
		for (int k = 0; k < 8; k++)
			c = c >> 1 ^ (0xedb88320 & -(c & 1));
		t[i] = c;
	}
	for (size_t i = 0; i < sizeof buffer; i++)
		buffer[i] = next(&x);
	uint32_t c = ~0u;
	for (int r = 0; r < 500; r++)
		for (size_t i = 0; i < sizeof buffer; i++)
			c = c >> 8 ^ t[(c ^ buffer[i]) & 255];
	return c;
}

static uint64_t bits_of(double v)
{
	uint64_t b;
	memcpy(&b, &v, 8);
	return b;
}

static uint64_t matmul(void)
{
	enum { N = 280 };
	static double a[N][N], b[N][N], c[N][N];
	for (int i = 0; i < N; i++)
		for (int j = 0; j < N; j++) {
			a[i][j] = i * 0.5 + j;
			b[i][j] = i - j * 0.25;
		}
	for (int r = 0; r < 4; r++)
		for (int i = 0, j = 0; i < N; i += j == N - 1, j = (j + 1) % N) {
			double s = r;
			for (int k = 0; k < N; k++)
				s += a[i][k] * b[k][j];
			c[i][j] = s;
		}
	return mix(bits_of(c[7][9]), bits_of(c[N - 1][N - 2]));
}

static uint64_t nbody(void)
{
	enum { N = 5 };
	double p[N][3], v[N][3], m[N];
	uint64_t x = 5;
	for (int i = 0; i < N; i++) {
		m[i] = 1 + next(&x) % 100 / 50.0;
		for (int k = 0; k < 3; k++) {
			p[i][k] = next(&x) % 1000 / 10.0;
			v[i][k] = next(&x) % 1000 / 1000.0;
		}
	}
	for (int step = 0; step < 500000; step++) {
		for (int i = 0; i < N; i++)
			for (int j = i + 1; j < N; j++) {
				double d[3], s = 0.01;
				for (int k = 0; k < 3; k++) {
					d[k] = p[i][k] - p[j][k];
					s += d[k] * d[k];
				}
				double f = 0.001 / (s * sqrt(s));
				for (int k = 0; k < 3; k++) {
					v[i][k] -= d[k] * m[j] * f;
					v[j][k] += d[k] * m[i] * f;
				}
			}
		for (int i = 0; i < N; i++)
			for (int k = 0; k < 3; k++)
				p[i][k] += 0.001 * v[i][k];
	}
	return mix(bits_of(p[0][0]), bits_of(v[4][2]));
}

static uint64_t x87(void)
{
	volatile long double scale = 1.0L;
	long double s = 0, x = 0.3L * scale;
	for (int i = 1; i < 6000000; i++) {
		x = x * 3.7L * (1.0L - x);
		s += x / i - fabsl(s) * 1e-9L;
	}
	return bits_of((double)s);
}

__attribute__((target("avx2,fma"))) static uint64_t fma8(void)
{
	enum { N = 4096 };
	static float a[N], b[N], c[N];
	for (int i = 0; i < N; i++) {
		a[i] = i * 0.001f;
		b[i] = 1 - i * 0.0001f;
	}
	for (int r = 0; r < 36000; r++)
		for (int i = 0; i < N; i += 16) {
			__m256 x = _mm256_fmadd_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i), _mm256_loadu_ps(c + i));
			__m256 y = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + 8), _mm256_loadu_ps(b + i + 8), _mm256_loadu_ps(c + i + 8));
			_mm256_storeu_ps(c + i, _mm256_mul_ps(x, _mm256_set1_ps(0.75f)));
			_mm256_storeu_ps(c + i + 8, _mm256_mul_ps(y, _mm256_set1_ps(0.75f)));
		}
	uint64_t h = 0;
	for (int i = 0; i < N; i += 100)
		h = mix(h, bits_of(c[i]));
	return h;
}

static uint64_t copies(void)
{
	enum { N = 1 << 20 };
	static char a[N], b[N];
	memset(a, 3, N);
	for (int r = 0; r < 1800; r++) {
		memcpy(b, a, N);
		a[r] = b[N - 1 - r] + r;
	}
	return mix(a[1799], b[300]);
}

/* Code that is changed before each call: one byte of an instruction that was just executed. */
static uint64_t smc(void)
{
	unsigned char *p = mmap(0, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t h = 0;
	memcpy(p, "\xb8\0\0\0\0\xc3", 6);
	for (int i = 0; i < 100000; i++) {
		p[1] = i;
		h = mix(h, ((int (*)(void))p)());
	}
	return h;
}

/* A compiler's way: new code on a writable page, made executable, executed, dropped. */
static uint64_t generate(void)
{
	uint64_t h = 0;
	for (int i = 0; i < 1000; i++) {
		unsigned char *p = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		unsigned char *q = p;
		memcpy(q, "\x31\xc0", 2);
		q += 2;
		for (int k = 0; k < 50; k++) {
			*q++ = k & 1 ? 0x35 : 0x05; /* xor, add eax, imm */
			uint32_t v = i * 2654435761u + k;
			memcpy(q, &v, 4);
			q += 4;
		}
		*q = 0xc3;
		mprotect(p, 8192, PROT_READ | PROT_EXEC);
		for (int k = 0; k < 10; k++)
			h = mix(h, ((uint32_t (*)(void))p)());
		munmap(p, 8192);
	}
	return h;
}

static uint64_t syscalls(void)
{
	long parent = syscall(SYS_getppid), same = 0;
	for (int i = 0; i < 300000; i++)
		same += syscall(SYS_getppid) == parent;
	return same;
}

static uint64_t pagefaults(void)
{
	uint64_t h = 0;
	for (int r = 0; r < 12; r++) {
		char *p = mmap(0, 8 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		madvise(p, 8 << 20, MADV_NOHUGEPAGE);
		for (int i = 0; i < 8 << 20; i += 4096)
			p[i] = i >> 13;
		h = mix(h, p[5 << 20]);
		munmap(p, 8 << 20);
	}
	return h;
}

static uint64_t forks(void)
{
	uint64_t h = 0;
	for (int i = 0; i < 300; i++) {
		int status;
		pid_t child = fork();
		if (!child)
			_exit(i & 63);
		waitpid(child, &status, 0);
		h = mix(h, WEXITSTATUS(status));
	}
	return h;
}

static uint64_t execs(void)
{
	uint64_t h = 0;
	for (int i = 0; i < 120; i++) {
		int status;
		pid_t child = fork();
		if (!child) {
			execl("/bin/busybox", "true", (char *)0);
			_exit(99);
		}
		waitpid(child, &status, 0);
		h = mix(h, WEXITSTATUS(status));
	}
	return h;
}

static uint64_t switches(void)
{
	int p[2], q[2];
	char c = 0;
	uint64_t sum = 0;
	if (pipe(p) || pipe(q))
		return 0;
	pid_t child = fork();
	if (!child) {
		for (int i = 0; i < 20000; i++) {
			if (read(p[0], &c, 1) != 1)
				_exit(1);
			c++;
			if (write(q[1], &c, 1) != 1)
				_exit(1);
		}
		_exit(0);
	}
	for (int i = 0; i < 20000; i++) {
		if (write(p[1], &c, 1) != 1 || read(q[0], &c, 1) != 1)
			break;
		sum += (unsigned char)c;
	}
	waitpid(child, 0, 0);
	return sum;
}

static void *spin(void *result)
{
	uint64_t v = 1;
	for (int i = 0; i < 60000000; i++)
		v = v * 6364136223846793005ull + (v >> 29);
	*(uint64_t *)result = v;
	return 0;
}

/* Two threads that share nothing. */
static uint64_t loops2(void)
{
	pthread_t t[2];
	uint64_t r[2] = { 0 };
	for (int i = 0; i < 2; i++)
		pthread_create(&t[i], 0, spin, &r[i]);
	for (int i = 0; i < 2; i++)
		pthread_join(t[i], 0);
	return r[0] + r[1];
}

static const struct {
	const char *name;
	uint64_t (*run)(void);
	void (*prepare)(void);
} WORKLOADS[] = {
	{ "sieve", sieve, 0 },           { "qsort", sort, 0 },       { "hash64m", hash64m, touch_table },
	{ "bytecode", bytecode, 0 },     { "fib", fib, 0 },          { "vcall", vcall, 0 },
	{ "strings", strings, 0 },       { "crc", crc, 0 },          { "matmul", matmul, 0 },
	{ "nbody", nbody, 0 },           { "x87", x87, 0 },          { "fma8", fma8, 0 },
	{ "memcpy", copies, 0 },         { "smc", smc, 0 },          { "generate", generate, 0 },
	{ "syscalls", syscalls, 0 },     { "pagefaults", pagefaults, 0 }, { "forks", forks, 0 },
	{ "execs", execs, 0 },           { "switches", switches, 0 }, { "loops2", loops2, 0 },
};

static uint64_t hash_of(int file)
{
	static unsigned char buffer[1 << 16];
	uint64_t h = 1469598103934665603ull;
	for (ssize_t n; (n = read(file, buffer, sizeof buffer)) > 0;)
		for (ssize_t i = 0; i < n; i++)
			h = mix(h, buffer[i]);
	return h;
}

static int run(char **argv)
{
	const char *name = argv[0], *check = argv[1];
	int out[2], status;
	if (pipe(out))
		return 1;
	count();
	uint64_t start = now();
	pid_t child = fork();
	if (!child) {
		dup2(out[1], 1);
		close(out[0]);
		close(out[1]);
		execvp(argv[2], argv + 2);
		perror(argv[2]);
		_exit(127);
	}
	close(out[1]);
	uint64_t h = hash_of(out[0]);
	waitpid(child, &status, 0);
	uint64_t end = now();
	if (!WIFEXITED(status) || WEXITSTATUS(status)) {
		fprintf(stderr, "%s failed: status %#x\n", name, status);
		return 1;
	}
	if (!strcmp(check, "none"))
		h = 0;
	else if (strcmp(check, "out"))
		h = hash_of(open(check, O_RDONLY));
	report(name, end - start, h);
	return 0;
}

static int text(long bytes)
{
	static const char *const WORDS[] = {
		"the", "guest", "page", "of", "memory", "translation", "and", "a", "is", "block", "table", "to",
		"when", "kernel", "writes", "interrupt", "device", "in", "that", "register",
	};
	uint64_t x = 11;
	for (long n = 0; n < bytes;) {
		uint64_t r = next(&x);
		n += r % 23 ? printf("%s ", WORDS[r / 23 % 20]) : printf("%llu.\n", (unsigned long long)(r % 100000));
	}
	return 0;
}

int main(int argc, char **argv)
{
	if (argc > 4 && !strcmp(argv[1], "run"))
		return run(argv + 2);
	if (argc > 2 && !strcmp(argv[1], "text"))
		return text(atol(argv[2]));
	for (size_t i = 0; argc > 1 && i < sizeof WORKLOADS / sizeof *WORKLOADS; i++)
		if (!strcmp(argv[1], WORKLOADS[i].name)) {
			if (WORKLOADS[i].prepare)
				WORKLOADS[i].prepare();
			count();
			uint64_t start = now();
			uint64_t sum = WORKLOADS[i].run();
			report(argv[1], now() - start, sum);
			return 0;
		}
	fprintf(stderr, "unknown workload\n");
	return 2;
}
