// colibri.h is valid C++11, and its functions are linked by their C names.
#include "colibri.h"

#include <cstring>

int main()
{
    colibri_model_t *model = nullptr;
    char error[256] = "";
    const int code = colibri_model_open(&model, "/nonexistent.colibri", error, sizeof error);
    return code == COLIBRI_E_IO && model == nullptr && std::strstr(error, "/nonexistent.colibri") && colibri_version() ? 0 : 1;
}
