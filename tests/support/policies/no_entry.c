/* A library, but no policy. */
int moecached_policy_something_else(void);
int moecached_policy_something_else(void) { return 1; }
