cd /tmp && cat >n.js <<'END'
function fib(n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
console.log(fib(25));
const m = new Map();
for (let i = 0; i < 60000; i++) m.set('k' + i % 997, (m.get('k' + i % 997) || 0) + i);
let h = 0;
for (const [k, v] of [...m].sort()) h = (Math.imul(h, 31) + k.length * 7 + v) | 0;
console.log(h);
const f = new Float64Array(20000);
for (let i = 0; i < f.length; i++) f[i] = Math.sqrt(i) * Math.sin(i);
console.log(f.reduce((a, b) => a + b, 0).toFixed(8));
for (let i = 0; i < 60; i++) { const g = new Function('a', 'b', `let s=0; for (let k=0;k<3000;k++) s=(s+a*${i}+b^k)|0; return s;`); h ^= g(i, h); }
console.log(h);
console.log(JSON.stringify([...'regular expressions and strings'.matchAll(/([a-z]+)\s?/g)].map(x => x[1])));
class A { constructor(v) { this.v = v; } get w() { return this.v * 2; } }
let s = 0; for (let i = 0; i < 200000; i++) s += (i & 1024 ? new A(i) : { w: i }).w;
console.log(s, BigInt(3) ** 200n % 1000000007n);
END
NO_COLOR=1 node n.js | cat
rm -f n.js
