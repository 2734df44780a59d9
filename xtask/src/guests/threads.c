/* Four threads whose order shows in what is printed: they draw numbers from one sequence, with a lock and without, and are preempted anywhere. */
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static volatile unsigned long sequence = 1, races;

static void *run(void *arg)
{
	unsigned long n = (unsigned long)arg, sum = 0;
	for (int i = 0; i < 40000; i++) {
		pthread_mutex_lock(&lock);
		sequence = sequence * 6364136223846793005ul + n;
		pthread_mutex_unlock(&lock);
		for (unsigned long k = sequence >> 58; k; k--)
			sum += k & 1 ? sum >> 3 : k;
		races += sum & 1;
		if (i % 5000 == 0)
			usleep(10);
	}
	return (void *)sum;
}

int main(void)
{
	pthread_t threads[4];
	unsigned long sum = 0;
	for (unsigned long n = 0; n < 4; n++)
		pthread_create(&threads[n], 0, run, (void *)(2 * n + 1));
	for (int n = 0; n < 4; n++) {
		void *result;
		pthread_join(threads[n], &result);
		sum = sum * 31 + (unsigned long)result;
	}
	printf("%lx %lx %lx\n", sequence, races, sum);
	return 0;
}
