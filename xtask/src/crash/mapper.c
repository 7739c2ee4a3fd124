// Reads "OFFSET LEN SYNC PATH\n" and LEN bytes, stores them through a shared mapping of the file, prints an errno or 0.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int store(const char *path, size_t offset, const char *data, size_t len, int sync)
{
	size_t page = 4096, start = offset / page * page;
	int fd = open(path, O_RDWR);
	if (fd < 0)
		return errno;
	char *map = mmap(NULL, offset + len - start, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)start);
	int error = map == MAP_FAILED ? errno : 0;
	close(fd);
	if (error)
		return error;
	memcpy(map + (offset - start), data, len);
	if (sync && msync(map, offset + len - start, MS_SYNC))
		error = errno;
	munmap(map, offset + len - start);
	return error;
}

int main(void)
{
	char line[5000], path[4097];
	while (fgets(line, sizeof line, stdin)) {
		size_t offset, len;
		int sync;
		if (sscanf(line, "%zu %zu %d %4096[^\n]", &offset, &len, &sync, path) != 4)
			return 2;
		char *data = malloc(len);
		if (!data || fread(data, 1, len, stdin) != len)
			return 2;
		printf("%d\n", store(path, offset, data, len, sync));
		fflush(stdout);
		free(data);
	}
	return 0;
}
