/* What gdb runs. */
int g; char c[16];
__attribute__((noinline)) int f(int n) {
    int s = 0;
    for (int i = 0; i < n; i++) { s += i * n; if (i % 7 == 3) g = s; c[i % 16]++; }
    return s;
}
__attribute__((noinline)) int h(int n) { return f(n) + g; }
int main(void) { int t = 0; for (int k = 0; k < 5; k++) t += f(10 + k); return h(t) & 0x7f; }
