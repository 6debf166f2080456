/* BERT's tokenizer for ASCII text: blanks and punctuation end words, WordPiece divides words.

A vocabulary is a trie in two arrays of the caller. An edge (node, byte) -> node is found by hashing,
with open addressing; `tokens[node]` is the id of the word that ends at a node, or -1. Words begin at
node 0 and continuations, without their prefix, at node 1. */

#include <stdint.h>

#define FIRST 0
#define CONTINUATION 1
#define NO_EDGE -1

typedef struct {
    int32_t key; /* node * 256 + byte; -1: free */
    int32_t child;
} edge;

static inline edge *find(edge *edges, int64_t mask, int32_t node, uint8_t byte) {
    int32_t key = node * 256 + byte;
    /* Multiplying spreads keys over the high bits, which the shift brings down. */
    uint64_t slot = ((uint64_t)key * 0x9e3779b97f4a7c15u) >> 20;
    while (edges[slot & mask].key != key && edges[slot & mask].key != NO_EDGE)
        slot++;
    return &edges[slot & mask];
}

/* Add words, end to end in `text`, to a trie of `nodes` nodes; return how many nodes it has then.
   The caller has filled `edges` and `tokens` with -1 and made room for a node per byte. */
int32_t packhorse_wordpiece_add(const uint8_t *text, const int64_t *ends, const int32_t *ids,
                                int64_t words, int32_t root, int32_t nodes, edge *edges,
                                int64_t mask, int32_t *tokens) {
    int64_t at = 0;
    for (int64_t word = 0; word < words; word++) {
        int32_t node = root;
        for (; at < ends[word]; at++) {
            edge *found = find(edges, mask, node, text[at]);
            if (found->key == NO_EDGE) {
                found->key = node * 256 + text[at];
                found->child = nodes++;
            }
            node = found->child;
        }
        if (node != root)
            tokens[node] = ids[word];
    }
    return nodes;
}

static inline int is_blank(uint8_t c) {
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static inline int is_punctuation(uint8_t c) {
    return (c >= 33 && c <= 47) || (c >= 58 && c <= 64) || (c >= 91 && c <= 96) ||
           (c >= 123 && c <= 126);
}

typedef struct {
    edge *edges;
    int64_t mask;
    const int32_t *tokens;
    int32_t unknown;
    int64_t longest_word;
    int lowercase;
} rules;

/* Return where the word that begins at `at` ends, or -1 if it has a byte that is not ASCII or is a
   control character. */
static inline int64_t end_of_word(const uint8_t *text, int64_t at, int64_t end) {
    if (is_punctuation(text[at]))
        return at + 1;
    for (; at < end && !is_blank(text[at]) && !is_punctuation(text[at]); at++)
        if (text[at] < 32 || text[at] >= 127)
            return -1;
    return at;
}

/* Divide the word text[at:end] into the longest pieces that the vocabulary has. Write their ids and,
   unless `ends` is NULL, where each ends; return how many there are. An unknown word is one piece. */
static int64_t divide(const uint8_t *text, int64_t at, int64_t end, const rules *rules, int32_t *ids,
                      int64_t *ends) {
    int64_t count = 0, piece = at;
    int is_unknown = end - at > rules->longest_word;
    while (!is_unknown && piece < end) {
        int64_t piece_end = 0;
        int32_t node = piece == at ? FIRST : CONTINUATION, id = -1;
        for (int64_t i = piece; i < end; i++) {
            uint8_t byte = text[i];
            if (rules->lowercase && byte >= 'A' && byte <= 'Z')
                byte += 'a' - 'A';
            edge *found = find(rules->edges, rules->mask, node, byte);
            if (found->key == NO_EDGE)
                break;
            node = found->child;
            if (rules->tokens[node] >= 0) { /* the longest piece wins */
                id = rules->tokens[node];
                piece_end = i + 1;
            }
        }
        is_unknown = id < 0;
        if (!is_unknown) {
            ids[count] = id;
            if (ends)
                ends[count] = piece_end;
            count++;
            piece = piece_end;
        }
    }
    if (is_unknown) { /* the whole word, whatever pieces were found */
        ids[0] = rules->unknown;
        if (ends)
            ends[0] = end;
        count = 1;
    }
    return count;
}

/* Tokenize texts, end to end in `text`. Tokens of all texts are written to `ids` and `offsets`, which
   have room for a token per byte; `counts` gets the tokens of each text, or -1 if the text has a byte
   that is not ASCII or is a control character: these need more rules than there are here. `piece_ends`
   has room for the pieces of the longest word. */
void packhorse_wordpiece(const uint8_t *text, const int64_t *ends, int64_t texts, edge *edges,
                         int64_t mask, const int32_t *tokens, int32_t unknown, int64_t longest_word,
                         int lowercase, int32_t *ids, int32_t *offsets, int64_t *counts,
                         int64_t *piece_ends) {
    rules rules = {edges, mask, tokens, unknown, longest_word, lowercase};
    int64_t begin = 0;
    for (int64_t number = 0; number < texts; number++) {
        int64_t end = ends[number], at = begin, count = 0;
        while (at < end) {
            if (is_blank(text[at])) {
                at++;
                continue;
            }
            int64_t word_end = end_of_word(text, at, end);
            if (word_end < 0) {
                count = -1;
                break;
            }
            int64_t pieces = divide(text, at, word_end, &rules, ids + count, piece_ends);
            for (int64_t i = 0; i < pieces; i++, count++) {
                offsets[2 * count] = (int32_t)(at - begin);
                offsets[2 * count + 1] = (int32_t)(piece_ends[i] - begin);
                at = piece_ends[i];
            }
        }
        counts[number] = count;
        if (count > 0) {
            ids += count;
            offsets += 2 * count;
        }
        begin = end;
    }
}

/* The same without offsets: whole sequences, each of `before` special ids, at most `room` tokens of
   the text, and `after` special ids. `ids` has room for a token per byte and the special ids of every
   text. `counts` gets the length of each sequence, or -1 as above; `cut` is 1 where text was left. */
void packhorse_wordpiece_sequences(const uint8_t *text, const int64_t *ends, int64_t texts,
                                   edge *edges, int64_t mask, const int32_t *tokens,
                                   int32_t unknown, int64_t longest_word, int lowercase,
                                   const int32_t *special, int64_t before, int64_t after,
                                   int64_t room, int32_t *ids, int64_t *counts, uint8_t *cut) {
    rules rules = {edges, mask, tokens, unknown, longest_word, lowercase};
    int64_t begin = 0;
    for (int64_t number = 0; number < texts; number++) {
        int64_t end = ends[number], at = begin, count = 0;
        int32_t *out = ids + before;
        while (at < end) {
            if (is_blank(text[at])) {
                at++;
                continue;
            }
            int64_t word_end = end_of_word(text, at, end);
            if (word_end < 0) {
                count = -1;
                break;
            }
            if (count >= room) { /* nothing of this word fits; the rest only has to be ASCII */
                count = room + 1;
                at = word_end;
                continue;
            }
            count += divide(text, at, word_end, &rules, out + count, 0);
            at = word_end;
        }
        begin = end;
        counts[number] = -1;
        cut[number] = 0;
        if (count < 0)
            continue;
        if (count > room) {
            cut[number] = 1;
            count = room;
        }
        for (int64_t i = 0; i < before; i++)
            ids[i] = special[i];
        for (int64_t i = 0; i < after; i++)
            out[count + i] = special[before + i];
        counts[number] = before + count + after;
        ids += counts[number];
    }
}
