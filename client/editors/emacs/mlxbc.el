;;; mlxbc.el --- Completion, chat and rewriting by a local mlxbc daemon  -*- lexical-binding: t; -*-

;; SPDX-License-Identifier: Apache-2.0
;; Version: 0.1.0
;; Package-Requires: ((emacs "28.1"))
;; Keywords: convenience, tools

;;; Commentary:

;; Talks to the mlxbc daemon over its Unix socket, one JSON object a line.
;;
;;   (add-hook 'prog-mode-hook #'mlxbc-mode)   ; suggestions while typing
;;   M-x mlxbc-complete         a suggestion at point, now
;;   M-x mlxbc-chat             a conversation in a buffer
;;   M-x mlxbc-rewrite-region   an instruction, and the region is rewritten
;;   M-x mlxbc-status, M-x mlxbc-cancel
;;
;; Nothing here waits for the daemon, except for `mlxbc-completion-at-point', which any key interrupts.

;;; Code:

(require 'json)
(require 'subr-x)

(defgroup mlxbc nil
  "Completion, chat and rewriting by a local mlxbc daemon."
  :group 'tools
  :prefix "mlxbc-")

(defcustom mlxbc-socket nil
  "The daemon's socket; nil finds the user's own, as the command `mlxbc' does."
  :type '(choice (const nil) file))

(defcustom mlxbc-delay 0.15
  "Seconds of silence at the keyboard before a suggestion is asked for."
  :type 'number)

(defcustom mlxbc-deadline-ms 3000
  "After so many milliseconds the daemon ends a suggestion with what it has."
  :type 'integer)

(defcustom mlxbc-max-tokens 96
  "The most tokens of a suggestion."
  :type 'integer)

(defcustom mlxbc-lines-before 256
  "Lines before point that the model sees."
  :type 'integer)

(defcustom mlxbc-lines-after 64
  "Lines after point that the model sees."
  :type 'integer)

(defcustom mlxbc-completion-model nil
  "The model that completes; nil leaves it to the daemon."
  :type '(choice (const nil) string))

(defcustom mlxbc-chat-model nil
  "The model that chats and rewrites; nil leaves it to the daemon."
  :type '(choice (const nil) string))

(defcustom mlxbc-chat-system nil
  "The system prompt of chats."
  :type '(choice (const nil) string))

(defcustom mlxbc-chat-fields nil
  "Other fields of a chat's or a rewriting's request: (:temperature 0.7)."
  :type 'plist)

(defface mlxbc-ghost '((t :inherit shadow))
  "A suggestion before it is accepted.")

(defface mlxbc-remark '((t :inherit shadow :slant italic))
  "How an answer is getting on.")


;;; The connection

(defvar mlxbc--process nil "The connection, if it is open.")
(defvar mlxbc--calls (make-hash-table) "Connection and handler of each running request, by id.")
(defvar mlxbc--last-id 0)
(defvar mlxbc--told nil "The trouble that the user has been told of.")
(defvar mlxbc--not-before 0 "Without a daemon: when to look for one again.")

(defconst mlxbc--absent "no daemon is running; start one with: mlxbc serve --detach")

(defun mlxbc--socket ()
  "The path of the daemon's socket."
  (let ((set (or mlxbc-socket (getenv "MLXBC_SOCKET"))))
    (if (and set (not (string-empty-p set)))
        (expand-file-name set)
      (if (eq system-type 'darwin)
          (expand-file-name "~/Library/Application Support/mlxbc/mlxbc.sock")
        (let* ((uid (number-to-string (user-uid)))
               (runtime (getenv "XDG_RUNTIME_DIR"))
               (places (list (concat "/run/user/" uid)
                             (concat (or (getenv "TMPDIR") "/tmp") "/runtime-" uid)))
               (paths (mapcar (lambda (place) (concat place "/mlxbc/mlxbc.sock"))
                              (if (string-empty-p (or runtime "")) places (cons runtime places)))))
          (or (seq-find #'file-exists-p paths) (car paths)))))))

(defun mlxbc--open ()
  "The connection, opened if need be; nil without a daemon."
  (unless (process-live-p mlxbc--process)
    (let* ((path (mlxbc--socket))
           (owner (file-attribute-user-id (file-attributes path 'integer))))
      (setq mlxbc--process
            (and owner (= owner (user-uid))
                 (ignore-errors
                   (make-network-process :name "mlxbc" :family 'local :service path :coding 'binary :noquery t
                                         :filter #'mlxbc--receive :sentinel #'mlxbc--lost))))
      (when mlxbc--process
        (mlxbc--write '(:type "hello" :proto 1 :client "mlxbc.el")))))
  mlxbc--process)

(defun mlxbc--write (message)
  "Write MESSAGE, a property list, as one line."
  (let ((line (json-serialize message)))
    (process-send-string mlxbc--process
                         (concat (if (multibyte-string-p line) (encode-coding-string line 'utf-8 t) line) "\n"))))

(defun mlxbc--send (message)
  "Write MESSAGE once the daemon has said welcome.
Emacs waits while it writes what the daemon doesn't read; one that
is just being started reads nothing."
  (if (process-get mlxbc--process 'greeted)
      (mlxbc--write message)
    (process-put mlxbc--process 'waiting (cons message (process-get mlxbc--process 'waiting))))
  (process-put mlxbc--process 'unheard (1+ (or (process-get mlxbc--process 'unheard) 0))))

(defun mlxbc--silent-p ()
  "Whether the daemon has stopped to answer: then it is asked no more."
  (and (process-live-p mlxbc--process)
       (>= (or (process-get mlxbc--process 'unheard) 0) 6)))

(defun mlxbc--receive (process bytes)
  "Take BYTES from PROCESS; hand out every line that is now whole."
  (process-put process 'unheard 0)
  (let ((start 0) end)
    (while (setq end (string-search "\n" bytes start))
      (let ((line (apply #'concat (nreverse (cons (substring bytes start end) (process-get process 'parts))))))
        (process-put process 'parts nil)
        (setq start (1+ end))
        (mlxbc--take process (json-parse-string (decode-coding-string line 'utf-8 t) :object-type 'plist))))
    (when (< start (length bytes))
      (process-put process 'parts (cons (substring bytes start) (process-get process 'parts))))))

(defun mlxbc--take (process message)
  "Tell the request that MESSAGE from PROCESS is for."
  (let ((id (plist-get message :id)))
    (cond ((and (null id) (equal (plist-get message :type) "error"))
           (process-put process 'error message)
           (delete-process process))
          ((equal (plist-get message :type) "welcome")
           (process-put process 'greeted t)
           (mapc #'mlxbc--write (nreverse (process-get process 'waiting))))
          ((gethash id mlxbc--calls)
           (let ((handler (cdr (gethash id mlxbc--calls))))
             (when (member (plist-get message :type) '("done" "error" "status_report"))
               (remhash id mlxbc--calls))
             (with-demoted-errors "mlxbc: %S" (funcall handler message)))))))

(defun mlxbc--lost (process _event)
  "PROCESS has ended: so have its requests."
  (unless (process-live-p process)
    (let ((error (or (process-get process 'error)
                     '(:type "error" :code "connection_lost"
                       :message "the connection to the daemon ended before the request did; ask again")))
          handlers)
      ;; Those of the next connection may be running already.
      (maphash (lambda (id call)
                 (when (eq (car call) process)
                   (push (cdr call) handlers)
                   (remhash id mlxbc--calls)))
               mlxbc--calls)
      (dolist (handler handlers)
        (with-demoted-errors "mlxbc: %S" (funcall handler error))))))

(defun mlxbc--request (message handler)
  "Send MESSAGE; HANDLER is called with each reply to it.
The last one is \"done\" or \"error\".  The value is an id for
`mlxbc--cancel-request', or nil if there was no daemon to ask."
  (let ((id (setq mlxbc--last-id (1+ mlxbc--last-id)))
        (message (append message (list :id mlxbc--last-id))))
    ;; The first time may be how we learn that the daemon was restarted.
    (if (or (mlxbc--try message) (mlxbc--try message))
        (progn (puthash id (cons mlxbc--process handler) mlxbc--calls) id)
      (funcall handler (list :type "error" :code "absent" :message mlxbc--absent))
      nil)))

(defun mlxbc--try (message)
  "Send MESSAGE; nil if there is no daemon, or none any more."
  (when (mlxbc--open)
    (condition-case nil
        (progn (mlxbc--send message) t)
      (error
       (delete-process mlxbc--process)
       nil))))

(defun mlxbc--cancel-request (id)
  "End request ID on the daemon; its handler hears nothing more."
  (let ((call (and id (gethash id mlxbc--calls))))
    (when call
      (remhash id mlxbc--calls)
      (when (and (eq (car call) mlxbc--process) (process-live-p mlxbc--process))
        (ignore-errors (mlxbc--send (list :type "cancel" :id id)))))))

(defun mlxbc--trouble (reply asked)
  "Tell the user of the error REPLY.
What the user ASKED for always answers; other troubles are told
once, until something works again."
  (let ((code (plist-get reply :code)))
    (when (equal code "absent")
      (setq mlxbc--not-before (+ (float-time) 2)))
    (when (or asked (not (or (member code '("shutting_down" "connection_lost")) (equal code mlxbc--told))))
      (unless asked (setq mlxbc--told code))
      (message "mlxbc: %s" (plist-get reply :message)))))

(defun mlxbc--works ()
  "Something worked: the next trouble is news."
  (setq mlxbc--told nil mlxbc--not-before 0))

(defun mlxbc--unicode (text)
  "TEXT without properties and without what is not Unicode."
  (replace-regexp-in-string "[^\0-\xD7FF\xE000-\x10FFFF]" "\uFFFD" (substring-no-properties text) t t))

(defun mlxbc--token (reply)
  "The text of REPLY, if it is a token of the answer itself."
  (and (equal (plist-get reply :type) "token")
       (member (plist-get reply :channel) '(nil "text"))
       (plist-get reply :text)))


;;; Completion

(defvar-local mlxbc--ghost nil "The overlay that shows the suggestion.")
(defvar-local mlxbc--call nil "The id of the request that it comes from, while that runs.")
(defvar-local mlxbc--rest "" "What of the suggestion would follow point.")
(defvar-local mlxbc--ended nil "Whether all of it is here.")
(defvar-local mlxbc--place nil "Point and the buffer's tick, as they were last seen.")
(defvar mlxbc-mode)
(defvar-local mlxbc--root nil "The directory that the file's path is told from.")
(defvar-local mlxbc--timer nil "Waits for silence at the keyboard.")

(defun mlxbc--root ()
  "The project's directory, or the file's."
  (or mlxbc--root
      (setq mlxbc--root (or (locate-dominating-file default-directory ".git") default-directory))))

(defun mlxbc--fim ()
  "The text around point, as the field `fim' of a request."
  (let* ((step (max 1 (/ mlxbc-lines-before 2)))
         (line (1- (line-number-at-pos nil t)))
         ;; The beginning moves in steps: one that moved with every line would make the daemon read all of it anew.
         (first (max 0 (* step (ceiling (- line mlxbc-lines-before) step))))
         (from (save-excursion (forward-line (- first line)) (point)))
         (to (save-excursion (forward-line (1+ mlxbc-lines-after)) (point)))
         ;; However long lines are, no more characters than these are sent.
         (excess (- (point) from 32768)))
    (setq to (min to (+ (point) 8192)))
    (when (> excess 0)
      (setq from (+ from (* 16384 (ceiling excess 16384)))))
    (append (list :prefix (mlxbc--unicode (buffer-substring from (point)))
                  :suffix (mlxbc--unicode (buffer-substring (point) to))
                  :language (string-remove-suffix "-mode" (symbol-name major-mode)))
            (and buffer-file-name
                 (list :path (mlxbc--unicode (file-relative-name buffer-file-name (mlxbc--root)))))
            (and (not (looking-at-p "[ \t]*$")) '(:single_line t)))))

(defun mlxbc--completion-request ()
  "The request for a completion at point."
  (append (list :type "generate" :supersede "completion" :priority "interactive"
                :deadline_ms mlxbc-deadline-ms :max_tokens mlxbc-max-tokens :temperature 0
                :fim (mlxbc--fim))
          (and mlxbc-completion-model (list :model mlxbc-completion-model))))

(defun mlxbc--seen ()
  "Point and the buffer's tick."
  (cons (point) (buffer-chars-modified-tick)))

(defun mlxbc-dismiss ()
  "Forget the suggestion, and end what runs for one."
  (interactive)
  (when (timerp mlxbc--timer)
    (cancel-timer mlxbc--timer))
  (mlxbc--cancel-request mlxbc--call)
  (when mlxbc--ghost
    (delete-overlay mlxbc--ghost))
  (setq mlxbc--timer nil mlxbc--call nil mlxbc--ghost nil mlxbc--rest "" mlxbc--ended nil)
  (mlxbc-ghost-mode -1))

(defun mlxbc--show ()
  "Show the suggestion behind point, or hide it if there is nothing to see."
  (if (string-blank-p mlxbc--rest)
      (progn
        (when mlxbc--ghost
          (overlay-put mlxbc--ghost 'after-string nil))
        (mlxbc-ghost-mode -1))
    (unless mlxbc--ghost
      (setq mlxbc--ghost (make-overlay (point) (point) nil t t)))
    (move-overlay mlxbc--ghost (point) (point))
    (let ((text (propertize mlxbc--rest 'face 'mlxbc-ghost)))
      (put-text-property 0 1 'cursor t text)  ; the cursor stands before the ghost
      (overlay-put mlxbc--ghost 'after-string text))
    (mlxbc-ghost-mode 1)))

(defun mlxbc--type (text)
  "The user typed TEXT.
Nil if the suggestion says something else, or has nothing more to say."
  (when (string-prefix-p text mlxbc--rest)
    (setq mlxbc--rest (substring mlxbc--rest (length text)))
    (not (and mlxbc--ended (string-empty-p mlxbc--rest)))))

(defun mlxbc--finish (cut)
  "All of the suggestion is here.
If it was CUT, it ends with its last whole line."
  (setq mlxbc--ended t mlxbc--call nil)
  (when (and cut (string-search "\n" mlxbc--rest))
    (setq mlxbc--rest (replace-regexp-in-string "\n[^\n]*\\'" "" mlxbc--rest)))
  (setq mlxbc--rest (string-trim-right mlxbc--rest))
  ;; What stands behind point already is not suggested again.
  (let ((behind (buffer-substring-no-properties (point) (line-end-position))))
    (unless (string-empty-p behind)
      (setq mlxbc--rest (string-remove-suffix behind mlxbc--rest)))))

(defun mlxbc--hear (reply asked)
  "Take REPLY to the request for a suggestion that the user ASKED for, or didn't."
  (let ((text (mlxbc--token reply)))
    (pcase (plist-get reply :type)
      ((guard text)
       (setq mlxbc--rest (concat mlxbc--rest text))
       (mlxbc--show))
      ("done"
       (mlxbc--works)
       (mlxbc--finish (member (plist-get reply :reason) '("length" "deadline")))
       (mlxbc--show))
      ("error"
       (setq mlxbc--call nil)
       (mlxbc-dismiss)
       (mlxbc--trouble reply asked)))))

(defun mlxbc-complete (&optional asked)
  "Ask for a suggestion at point; interactively the user ASKED for it."
  (interactive (list t))
  (mlxbc-dismiss)
  (setq mlxbc--place (mlxbc--seen))
  (let* ((buffer (current-buffer))
         (id (mlxbc--request (mlxbc--completion-request)
                             (lambda (reply)
                               (when (buffer-live-p buffer)
                                 (with-current-buffer buffer
                                   (mlxbc--hear reply asked)))))))
    (setq mlxbc--call id)))

(defun mlxbc--after-command ()
  "See what the last command did to the suggestion, and ask for another."
  (let ((before mlxbc--place)
        (now (mlxbc--seen)))
    (unless (equal before now)
      (setq mlxbc--place now)
      (cond ((and before (= (cdr before) (cdr now)))  ; moved, nothing else
             (mlxbc-dismiss))
            ((and (or mlxbc--call mlxbc--ghost)
                  (eq this-command #'self-insert-command)
                  (> (car now) (car before))
                  (mlxbc--type (buffer-substring-no-properties (car before) (car now))))
             (mlxbc--show))
            (t
             (mlxbc-dismiss)
             (when (and mlxbc-mode (not buffer-read-only) (not (mlxbc--silent-p))
                        (>= (float-time) mlxbc--not-before))
               (setq mlxbc--timer
                     (run-with-idle-timer mlxbc-delay nil #'mlxbc--after-silence (current-buffer) now))))))))

(defun mlxbc--after-silence (buffer place)
  "Ask for a suggestion, if BUFFER is where the user is, and still at PLACE."
  (when (and (eq buffer (window-buffer (selected-window))) (buffer-live-p buffer))
    (with-current-buffer buffer
      (when (equal place (mlxbc--seen))
        (mlxbc-complete)))))

(defun mlxbc--accept (taken)
  "Insert TAKEN, the beginning of the suggestion; keep the rest."
  (let ((rest (substring mlxbc--rest (length taken))))
    (insert taken)
    (if (string-empty-p rest)
        (mlxbc-dismiss)
      (setq mlxbc--rest rest
            mlxbc--place (mlxbc--seen))
      (mlxbc--show))))

(defun mlxbc-accept ()
  "Insert the whole suggestion."
  (interactive)
  (mlxbc--accept mlxbc--rest)
  (mlxbc-dismiss))

(defun mlxbc-accept-word ()
  "Insert the suggestion's next word."
  (interactive)
  (mlxbc--accept (if (string-match "\\`[ \t\n]*\\(?:[[:word:]_]+\\|[^[:word:]_ \t\n]+\\)" mlxbc--rest)
                     (match-string 0 mlxbc--rest)
                   mlxbc--rest)))

(defun mlxbc-accept-line ()
  "Insert the suggestion's next line."
  (interactive)
  (string-match "\\`\n?[^\n]*" mlxbc--rest)
  (mlxbc--accept (match-string 0 mlxbc--rest)))

(defvar mlxbc-ghost-map
  (let ((map (make-sparse-keymap)))
    (define-key map (kbd "TAB") #'mlxbc-accept)
    (define-key map (kbd "<tab>") #'mlxbc-accept)
    (define-key map (kbd "M-f") #'mlxbc-accept-word)
    (define-key map (kbd "M-e") #'mlxbc-accept-line)
    (define-key map (kbd "C-g") #'mlxbc-dismiss)
    map)
  "Keys while a suggestion is shown.")

(define-minor-mode mlxbc-ghost-mode
  "Is on while a suggestion is shown; nothing to switch by hand."
  :init-value nil
  :keymap mlxbc-ghost-map)

;;;###autoload
(define-minor-mode mlxbc-mode
  "Suggest while typing, with a local language model."
  :lighter " mlxbc"
  (if mlxbc-mode
      (progn
        (setq mlxbc--place (mlxbc--seen))
        (add-hook 'post-command-hook #'mlxbc--after-command nil t))
    (remove-hook 'post-command-hook #'mlxbc--after-command t)
    (mlxbc-dismiss)))

;;;###autoload
(defun mlxbc-completion-at-point ()
  "A completion at point by the model, for `completion-at-point-functions'.
It waits for the daemon, at most `mlxbc-deadline-ms'; any key interrupts it."
  (let* ((text "") (ended nil)
         (id (mlxbc--request (mlxbc--completion-request)
                             (lambda (reply)
                               (if-let* ((token (mlxbc--token reply)))
                                   (setq text (concat text token))
                                 (pcase (plist-get reply :type)
                                   ("done" (mlxbc--works) (setq ended 'done))
                                   ("error" (mlxbc--trouble reply t) (setq ended 'error)))))))
         (until (+ (float-time) (/ mlxbc-deadline-ms 1000.0) 1)))
    (unwind-protect
        (while (and (not ended) (< (float-time) until) (not (input-pending-p)))
          (accept-process-output mlxbc--process 0.05))
      (mlxbc--cancel-request id))
    (setq text (string-trim-right text))
    (when (and (eq ended 'done) (not (string-empty-p text)))
      (list (point) (point) (list text) :exclusive 'no))))


;;; Chat

(defconst mlxbc--you "─── you ───")
(defconst mlxbc--model "─── mlxbc ───")

(defvar-local mlxbc--answer nil "The answer that is being written: a plist of :id, :at and :remark.")

(defvar mlxbc-chat-mode-map
  (let ((map (make-sparse-keymap)))
    (define-key map (kbd "C-c C-c") #'mlxbc-chat-send)
    (define-key map (kbd "C-c C-k") #'mlxbc-cancel)
    map))

(define-derived-mode mlxbc-chat-mode text-mode "mlxbc chat"
  "A conversation: what stands under its headings is what the model is sent.

\\{mlxbc-chat-mode-map}"
  (setq-local font-lock-defaults
              `(((,(concat "^\\(?:" mlxbc--you "\\|" mlxbc--model "\\)$") . font-lock-keyword-face)) t))
  (visual-line-mode 1))

(defun mlxbc--conversation ()
  "The messages under the headings of this buffer, as a list."
  (save-excursion
    (goto-char (point-min))
    (let (messages)
      (while (re-search-forward (concat "^\\(?:\\(" mlxbc--you "\\)\\|" mlxbc--model "\\)$") nil t)
        (let* ((role (if (match-string 1) "user" "assistant"))
               (start (point))
               (end (save-excursion
                      (if (re-search-forward (concat "^\\(?:" mlxbc--you "\\|" mlxbc--model "\\)$") nil t)
                          (match-beginning 0)
                        (point-max))))
               (content (string-trim (mlxbc--unicode (buffer-substring start end)))))
          (unless (string-empty-p content)
            (push (list :role role :content content) messages))))
      (nreverse messages))))

;;;###autoload
(defun mlxbc-chat (&optional question)
  "Open the chat; with a QUESTION, ask it."
  (interactive (list (read-string "Ask (empty: just open the chat): ")))
  (pop-to-buffer "*mlxbc chat*")
  (unless (derived-mode-p 'mlxbc-chat-mode)
    (mlxbc-chat-mode)
    (insert mlxbc--you "\n"))
  (goto-char (point-max))
  (unless (string-empty-p (or question ""))
    (when mlxbc--answer
      (user-error "An answer is being written; C-c C-k ends it"))
    (insert question)
    (mlxbc-chat-send)))

(defun mlxbc-chat-send ()
  "Send the conversation and write the answer below it."
  (interactive)
  (when mlxbc--answer
    (user-error "An answer is being written; C-c C-k ends it"))
  (let ((messages (mlxbc--conversation))
        (buffer (current-buffer)))
    (unless (equal (plist-get (car (last messages)) :role) "user")
      (user-error "Write your message below the last heading first"))
    (when mlxbc-chat-system
      (push (list :role "system" :content mlxbc-chat-system) messages))
    (goto-char (point-max))
    (insert "\n\n" mlxbc--model)
    (let ((remark (make-overlay (point) (point))))
      (insert "\n")
      (setq mlxbc--answer (list :remark remark :at (copy-marker (point) t)))
      (setq mlxbc--answer
            (plist-put mlxbc--answer :id
                       (mlxbc--request (mlxbc--chat-request messages)
                                       (lambda (reply)
                                         (when (buffer-live-p buffer)
                                           (with-current-buffer buffer
                                             (mlxbc--chat-hear reply))))))))))

(defun mlxbc--chat-request (messages)
  "A request that answers MESSAGES, a list."
  (append (list :type "generate" :messages (vconcat messages) :priority "interactive")
          (and mlxbc-chat-model (list :model mlxbc-chat-model))
          mlxbc-chat-fields))

(defun mlxbc--remark (overlay text)
  "Show the passing remark TEXT, or none, at OVERLAY."
  (overlay-put overlay 'after-string (and text (propertize (concat "  " text) 'face 'mlxbc-remark))))

(defun mlxbc--progress (reply)
  "How far the daemon is, as REPLY tells; nil if it doesn't."
  (pcase (plist-get reply :type)
    ("accepted" "waiting")
    ("progress" (format "%s, %d %%"
                        (if (equal (plist-get reply :phase) "load") "loading the model" "reading")
                        (/ (* 100.0 (plist-get reply :done)) (max 1 (plist-get reply :total)))))
    ("token" (and (equal (plist-get reply :channel) "reasoning") "thinking"))))

(defun mlxbc--chat-hear (reply)
  "Take REPLY to the last message of the chat."
  (when mlxbc--answer
    (let ((text (mlxbc--token reply))
          (at (plist-get mlxbc--answer :at))
          (remark (plist-get mlxbc--answer :remark)))
      (cond (text
             (mlxbc--remark remark nil)
             (mlxbc--insert at text))
            ((equal (plist-get reply :type) "done")
             (mlxbc--works)
             (mlxbc--chat-end (unless (equal (plist-get reply :reason) "stop") (plist-get reply :reason))))
            ((equal (plist-get reply :type) "error")
             (mlxbc--chat-end (plist-get reply :message)))
            (t
             (when-let* ((progress (mlxbc--progress reply)))
               (mlxbc--remark remark progress)))))))

(defun mlxbc--insert (at text)
  "Insert TEXT at the marker AT; whoever stands there moves on with it."
  (let ((windows (seq-filter (lambda (window) (= (window-point window) at))
                             (get-buffer-window-list nil nil t)))
        (here (= (point) at)))
    (save-excursion
      (goto-char at)
      (insert text))
    (when here
      (goto-char at))
    (dolist (window windows)
      (set-window-point window at))))

(defun mlxbc--chat-end (remark)
  "The answer has ended, which a REMARK may explain."
  (let ((at (plist-get mlxbc--answer :at)))
    (mlxbc--remark (plist-get mlxbc--answer :remark) remark)
    (setq mlxbc--answer nil)
    (mlxbc--insert at (concat "\n\n" mlxbc--you "\n"))
    (set-marker at nil)))


;;; Rewriting

(defvar-local mlxbc--rewritings nil "The rewritings under way in this buffer, each a plist.")

(defconst mlxbc--instructions
  (concat "You edit text. You are given an instruction and a text. Answer with the edited text alone: no "
          "explanation, no code fence, the same indentation."))

(defun mlxbc--bare (answer)
  "ANSWER without the code fence that models like to put around it."
  (let ((text (string-trim-right (replace-regexp-in-string "\\`\\(?:[ \t]*\n\\)+" "" answer))))
    (if (string-match "\\`[ \t]*```[^\n]*\n\\(\\(?:.\\|\n\\)*?\\)\n?[ \t]*```\\'" text)
        (match-string 1 text)
      text)))

;;;###autoload
(defun mlxbc-rewrite-region (start end instruction)
  "Rewrite the text from START to END as INSTRUCTION says."
  (interactive "r\nsRewrite how? ")
  (let* ((buffer (current-buffer))
         (before (buffer-substring-no-properties start end))
         (newline (and (string-suffix-p "\n" before) "\n"))
         (overlay (make-overlay start end))
         (mine (list :overlay overlay :before before :newline newline :answer ""))
         (messages (list (list :role "system" :content mlxbc--instructions)
                         (list :role "user"
                               :content (format "Instruction: %s\n\nText, from %s:\n%s" instruction
                                                (buffer-name) (mlxbc--unicode (string-remove-suffix "\n" before)))))))
    (overlay-put overlay 'face 'region)
    (mlxbc--remark overlay "rewriting")
    (push mine mlxbc--rewritings)
    (deactivate-mark)
    (plist-put mine :id (mlxbc--request (mlxbc--chat-request messages)
                                        (lambda (reply)
                                          (when (buffer-live-p buffer)
                                            (with-current-buffer buffer
                                              (mlxbc--rewrite-hear mine reply))))))))

(defun mlxbc--rewrite-hear (mine reply)
  "Take REPLY for the rewriting MINE."
  (when (memq mine mlxbc--rewritings)
    (let ((text (mlxbc--token reply)))
      (cond (text
             (plist-put mine :answer (concat (plist-get mine :answer) text))
             (mlxbc--remark (plist-get mine :overlay)
                            (format "rewriting, %d characters" (length (plist-get mine :answer)))))
            ((equal (plist-get reply :type) "done")
             (mlxbc--works)
             (if (equal (plist-get reply :reason) "stop")
                 (mlxbc--rewrite-replace mine)
               (message "mlxbc: the answer was cut (%s); the text stays as it is" (plist-get reply :reason)))
             (mlxbc--rewrite-end mine))
            ((equal (plist-get reply :type) "error")
             (mlxbc--rewrite-end mine)
             (mlxbc--trouble reply t))))))

(defun mlxbc--rewrite-replace (mine)
  "Put the answer of MINE where the text was, unless that has changed."
  (let* ((overlay (plist-get mine :overlay))
         (start (overlay-start overlay))
         (end (overlay-end overlay))
         (answer (concat (mlxbc--bare (plist-get mine :answer)) (plist-get mine :newline))))
    (if (and start (string= (buffer-substring-no-properties start end) (plist-get mine :before)))
        (save-excursion
          (undo-boundary)
          (atomic-change-group
            (goto-char start)
            (delete-region start end)
            (insert answer))
          (undo-boundary))
      (kill-new answer)
      (message "mlxbc: the text was changed meanwhile; C-y inserts the answer"))))

(defun mlxbc--rewrite-end (mine)
  "MINE is over."
  (delete-overlay (plist-get mine :overlay))
  (setq mlxbc--rewritings (delq mine mlxbc--rewritings)))


;;; Everything else

(defun mlxbc-cancel ()
  "End suggestion, answer and rewritings of this buffer.
What came of an answer stays."
  (interactive)
  (mlxbc-dismiss)
  (dolist (mine mlxbc--rewritings)
    (mlxbc--cancel-request (plist-get mine :id))
    (mlxbc--rewrite-end mine))
  (when mlxbc--answer
    (mlxbc--cancel-request (plist-get mlxbc--answer :id))
    (mlxbc--chat-end "cancelled")))

(defun mlxbc-status ()
  "Say in one line how the daemon is."
  (interactive)
  (mlxbc--request '(:type "status")
                  (lambda (reply)
                    (if (equal (plist-get reply :type) "error")
                        (mlxbc--trouble reply t)
                      (message "mlxbc: %s, %d running, %d queued, %s"
                               (plist-get reply :state) (plist-get reply :running) (plist-get reply :queued)
                               (mapconcat (lambda (model) (plist-get model :model))
                                          (plist-get reply :models) ", "))))))

(provide 'mlxbc)

;;; mlxbc.el ends here
