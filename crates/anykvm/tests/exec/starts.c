/* Starts a program by a descriptor: of its file, of its folder, or of a copy that has no name; or by a system call
   of its own.
   starts fd|at|memory|call|call-at PROGRAM ARGUMENT... */
#include "check.h"
#include <libgen.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>

int main(int argc, char **argv) {
    CHECK(argc > 2);
    const char *how = argv[1];
    char *program = argv[2];
    char **arguments = argv + 2;
    if (!strcmp(how, "fd")) {
        int fd = open(program, O_RDONLY | O_CLOEXEC);
        CHECK(fd >= 0);
        fexecve(fd, arguments, environ);
    } else if (!strcmp(how, "at")) {
        char *copy = strdup(program);
        int folder = open(dirname(copy), O_PATH | O_DIRECTORY | O_CLOEXEC);
        CHECK(folder >= 0);
        execveat(folder, strrchr(program, '/') + 1, arguments, environ, 0);
    } else if (!strcmp(how, "call")) {
        syscall(SYS_execve, program, arguments, environ);
    } else if (!strcmp(how, "call-at")) {
        int fd = open(program, O_RDONLY | O_CLOEXEC);
        CHECK(fd >= 0);
        syscall(SYS_execveat, fd, "", arguments, environ, AT_EMPTY_PATH);
    } else {
        int fd = open(program, O_RDONLY | O_CLOEXEC);
        struct stat data;
        CHECK(fd >= 0 && fstat(fd, &data) == 0);
        int memory = memfd_create("copy", MFD_CLOEXEC);
        CHECK(memory >= 0);
        for (off_t at = 0; at < data.st_size;)
            CHECK(sendfile(memory, fd, &at, data.st_size - at) > 0);
        execveat(memory, "", arguments, environ, AT_EMPTY_PATH);
    }
    CHECK(!"started");
}
